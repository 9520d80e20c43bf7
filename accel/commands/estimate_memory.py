"""``accel estimate-memory``: bytes of a model by format of its weights and strategy."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import nn

from accel.commands import CommandParser
from accel.logging import silenced
from accel.machine.errors import ConfigError, nearest, text_of, unknown_choice
from accel.machine.imports import load_attribute, require
from accel.precision.fp8 import CHATTY
from accel.strategies.spec import MemoryLayout
from accel.strategies.table import specs
from accel.weights.sizes import convert_bytes, get_max_layer_size, own_parts
from accel.weights.tensors import init_empty_weights

FORMATS = ("fp32", "bf16", "pure_bf16")
CONFIG = "config.json"
COLUMNS = ("format", "strategy", "weights", "gradients", "optimizer", "total", "largest")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Footprint:
    """What one process holds of a run's models, in bytes, once it has made a step.

    Attributes:
        parameters: of the models, frozen ones included.
        gradients: of trainable parameters.
        optimizer_state: what optimizers keep between steps, copies of weights in another format
            included; None: not known before the first step.
    """

    parameters: int
    gradients: int
    optimizer_state: int | None


@dataclass(frozen=True)
class Estimate:
    """What one process holds of a model.

    Attributes:
        format: of its weights: "fp32"; "bf16" (mixed precision); "pure_bf16", with gradients and
            optimizer state in bf16, as torch.optim keeps it (`precision=bf16_weights` of a recipe
            has moments in fp32: 4 bytes a weight more).
        strategy: how it is distributed.
        num_processes: over which it is.
        footprint: bytes of parameters and buffers, gradients, and optimizer state.
        largest_layer: bytes of the layer with the most, unsharded: sharded parameters of it are
            gathered while it computes.
    """

    format: str
    strategy: str
    num_processes: int
    footprint: Footprint
    largest_layer: int

    @property
    def total(self) -> int | None:
        """The sum, without activations; None where the optimizer state is not known."""
        state = self.footprint.optimizer_state
        held = self.footprint.parameters + self.footprint.gradients
        return None if state is None else held + state


def layouts() -> list[MemoryLayout]:
    """Return the ways to distribute a model, of all strategies."""
    return [layout for spec in specs() for layout in spec.memory]


def estimates(
    model: nn.Module,
    num_processes: int = 1,
    formats: Sequence[str] | None = None,
    strategies: Sequence[str] | None = None,
    optimizer: str = "AdamW",
) -> list[Estimate]:
    """Return what a process holds of a model, by format and strategy.

    Shards are those of dim 0 of each weight, of the first process. What is held for a while only
    is not counted: activations, gathered weights, buckets of gradients.

    Args:
        model: on any device, also meta.
        num_processes: the number of processes.
        formats: of `FORMATS`; None: those that there are.
        strategies: names of `layouts`; None: all.
        optimizer: name of a class of `torch.optim`, called with its defaults.

    Raises:
        ConfigError: for a format, strategy or optimizer that does not exist, or a format that none
            of the strategies trains in.
    """
    known = {layout.name: layout for layout in layouts()}
    chosen = list(known) if strategies is None else strategies
    wanted = FORMATS if formats is None else formats
    for where, given, names in (("format", wanted, FORMATS), ("strategy", chosen, known)):
        for value in given:
            if value not in names:
                raise ConfigError(unknown_choice(where, value, names))
    if num_processes < 1:
        raise ConfigError.of(f"num_processes={num_processes}", "it is at least 1", "Give 8, say.")
    kind = _optimizer(optimizer)
    found = [
        _trained(model, format, known[name], num_processes, kind)
        for format in wanted
        for name in chosen
        if format != "pure_bf16" or not known[name].casts_weights
    ]
    if formats is not None and {one.format for one in found} != set(formats):
        value = f"format='pure_bf16' with strategy={', '.join(chosen)}"
        rule = "weights in bf16 have fp32 master weights there"
        raise ConfigError.of(value, rule, "Choose format='bf16', or a strategy without them.")
    return found


def _optimizer(name: str) -> type[torch.optim.Optimizer]:
    kinds = {
        found.__name__: found
        for _, found in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
    }
    if name not in kinds:
        rule = "torch.optim has no such class"
        raise ConfigError.of(f"optimizer={name!r}", rule, nearest(name, kinds))
    return kinds[name]


# -- formats -------------------------------------------------------------------------------


def _trained(
    model: nn.Module,
    format: str,
    layout: MemoryLayout,
    num_processes: int,
    kind: type[torch.optim.Optimizer],
) -> Estimate:
    trained = torch.bfloat16 if format == "pure_bf16" else torch.float32
    casts = format == "bf16" and layout.casts_weights
    weights = torch.bfloat16 if casts else trained
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]

    def bytes_of(what: str, tensors: Iterable[torch.Tensor]) -> int:
        shapes = [_shape(tensor, layout, what, num_processes) for tensor in tensors]
        return sum(map(math.prod, shapes)) * weights.itemsize

    shards = [_shape(tensor, layout, "optimizer", num_processes) for tensor in trainable]
    state = _state_bytes(kind, shards, trained)
    if state is not None and (casts or layout.copies_fp32):
        state += sum(map(math.prod, shards)) * torch.float32.itemsize
    buffers = _buffer_bytes(model, weights if trained == torch.bfloat16 or casts else None)
    footprint = Footprint(
        bytes_of("parameters", parameters) + buffers, bytes_of("gradients", trainable), state
    )
    sizes = {
        name: tensor.numel() * weights.itemsize
        for name, tensor in model.named_parameters(remove_duplicate=False)
    }
    return Estimate(format, layout.name, num_processes, footprint, _largest(model, sizes))


def _shape(tensor: torch.Tensor, layout: MemoryLayout, what: str, num_processes: int) -> Shape:
    """Return the shape of the first process's part of a tensor."""
    if what not in layout.sharded or not tensor.ndim:
        return tuple(tensor.shape)
    return (-(-len(tensor) // num_processes), *tensor.shape[1:])


def _state_bytes(
    kind: type[torch.optim.Optimizer], shapes: Sequence[Shape], dtype: torch.dtype
) -> int | None:
    """Return the bytes of an optimizer's state for weights of these shapes; None: not known."""
    if not shapes:
        return 0
    ghosts = [nn.Parameter(torch.empty(s, dtype=dtype, device="meta")) for s in shapes]
    make: Any = kind
    try:
        made = make(ghosts)
    except (TypeError, ValueError) as error:  # it needs a learning rate, or takes matrices only
        value, rule = f"optimizer={kind.__name__!r}", f"it does not take the model ({error})"
        raise ConfigError.of(value, rule, "Name another, such as AdamW.") from error
    for ghost in ghosts:
        ghost.grad = torch.empty_like(ghost)
    try:
        made.step()
    except (RuntimeError, TypeError):  # it reads values (Adafactor), or calls for losses (LBFGS)
        return None
    state = [value for entry in made.state.values() for value in entry.values()]
    return sum(value.nbytes for value in state if isinstance(value, torch.Tensor))


def _buffer_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes of the buffers, floating ones in a dtype if one is given."""
    return sum(
        buffer.numel()
        * (dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype).itemsize
        for buffer in model.buffers()
    )


def _largest(model: nn.Module, sizes: dict[str, int]) -> int:
    """Return the bytes of the parameters of the largest layer: a block, or a leaf module."""
    totals = {"": 0}
    for name, size in sizes.items():
        parts = name.split(".")
        for end in range(len(parts) + 1):
            prefix = ".".join(parts[:end])
            totals[prefix] = totals.get(prefix, 0) + size
    blocks = getattr(model, "_no_split_modules", None) or ()
    return get_max_layer_size(own_parts(model), totals, blocks)[0]


# -- the command -------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Print what a process would hold of a model, by format of its weights and strategy.

    Raises:
        ConfigError: if there is no such model, format, strategy or optimizer.
    """
    parser = CommandParser(
        prog="accel estimate-memory",
        description="Estimate the memory of a model's weights, gradients and optimizer state.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help=f"a folder with a {CONFIG}, or package.module.factory",
    )
    add("arguments", metavar="KEY=VALUE", nargs="*", help="arguments of the factory")
    add("--num_processes", "--num-processes", type=int, default=1, metavar="N")
    add("--format", action="append", help="fp32, bf16, pure_bf16 (may be repeated)")
    add("--strategy", action="append", help="how it is distributed (may be repeated)")
    add("--optimizer", default="AdamW", help="class of torch.optim (default: AdamW)")
    add("--json", action="store_true", help="print JSON, with bytes")
    found = parser.parse_intermixed_args(list(arguments))
    model = _model(found.model, found.arguments)
    rows = estimates(model, found.num_processes, found.format, found.strategy, found.optimizer)
    if found.json:
        print(json.dumps([_plain(one) for one in rows], indent=2))
    else:
        _show(model, found.model, found.num_processes, found.optimizer, rows)
    return 0


def _plain(estimate: Estimate) -> dict[str, object]:
    fields = dataclasses.asdict(estimate)
    footprint = fields.pop("footprint")
    return {**fields, **footprint, "total": estimate.total}


def _show(
    model: nn.Module, name: str, num_processes: int, optimizer: str, rows: Sequence[Estimate]
) -> None:
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{Path(name).name} · {weights:,} parameters · {optimizer} · {num_processes} processes")
    print()
    print(_line(COLUMNS))
    for one in rows:
        held = one.footprint
        sizes = (held.parameters, held.gradients, held.optimizer_state, one.total)
        print(_line((one.format, one.strategy, *map(_shown, (*sizes, one.largest_layer)))))
    print()
    print("On top come activations, and the largest layer while it is gathered.")


def _line(cells: Sequence[str]) -> str:
    return " ".join([f"{cells[0]:<10} {cells[1]:<10}", *(f"{cell:>10}" for cell in cells[2:])])


def _shown(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else convert_bytes(num_bytes)


# -- the model -----------------------------------------------------------------------------


def _model(name: str, arguments: Sequence[str]) -> nn.Module:
    """Return the model, its parameters on the meta device."""
    path = Path(name).expanduser()
    if path.exists():
        if arguments:
            rule, remedy = f"{CONFIG} has all that is to know", "Change it there."
            raise ConfigError.of(" ".join(arguments), rule, remedy)
        return _of_transformers(path.parent if path.name == CONFIG else path)
    factory, given = _factory(name), _parsed(arguments)
    try:
        with init_empty_weights(include_buffers=False):
            made = factory(**given)
    except TypeError as error:
        raise ConfigError.of(name, f"{error}", "Correct its arguments.") from error
    if not isinstance(made, nn.Module):
        rule = f"it returns {type(made).__name__}, not a torch.nn.Module"
        raise ConfigError.of(name, rule, "Name a factory of models.")
    return made


def _factory(name: str) -> Callable[..., object]:
    module, _, attribute = name.rpartition(".")
    rule = "there is no such folder, and no such package.module.factory"
    remedy = f"Name the folder of a {CONFIG}, or a factory as package.module.factory."
    if not module or os.sep in name:
        raise ConfigError.of(name, rule, remedy)
    sys.path.append(os.getcwd())  # last, so that a file there hides no package
    try:
        found: Callable[..., object] = load_attribute(f"{module}:{attribute}")
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(name, f"{rule} ({error})", remedy) from error
    finally:
        sys.path.pop()
    return found


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument in arguments:
        key, given, value = argument.partition("=")
        if not given or not key.isidentifier():
            raise ConfigError.of(argument, "it is KEY=VALUE", "Give dim=64, say.")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            rule = f"the value is YAML ({str(error).splitlines()[0]})"
            raise ConfigError.of(argument, rule, "Correct it, or quote it.") from error
    return found


def _of_transformers(folder: Path) -> nn.Module:
    """Return the model that a config.json describes, which runs no code of the folder."""
    if not (folder / CONFIG).is_file():
        remedy = f"Name a folder that a model was saved in, with its {CONFIG}."
        raise ConfigError.of(str(folder), f"it holds no {CONFIG}", remedy)
    transformers = require("transformers", f"accel estimate-memory {folder}", extra="examples")
    try:
        with silenced(CHATTY, logging.ERROR):  # transformers imports torchao
            config = transformers.AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            named = (getattr(config, "architectures", None) or [""])[0]
            kind = getattr(transformers, named, None) if named else None
            with init_empty_weights(include_buffers=True):
                model: nn.Module = (
                    transformers.AutoModel.from_config(config) if kind is None else kind(config)
                )
    except Exception as error:  # of any kind: the model's own code computes with the values
        reason = " ".join(text_of(error).split()) or type(error).__name__
        rule = f"transformers makes no model of its {CONFIG} ({reason})"
        remedy = "Correct the value there, or name a model that transformers has."
        raise ConfigError.of(str(folder), rule, remedy) from error
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    return model
