"""Bytes that a process would hold of a model: by format of its weights, and strategy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.config.quantization import BnbQuantizationConfig
from accel.logging import get_logger
from accel.machine.errors import ConfigError, Problem, nearest, unknown_choice
from accel.machine.memory_estimate import Footprint, state_bytes
from accel.strategies.spec import MemoryLayout
from accel.strategies.table import specs
from accel.weights.quantize import to_quantize
from accel.weights.sizes import get_max_layer_size, own_parts

# Formats that all weights train in, and those of frozen linear layers beside weights in 16 bits.
TRAINED = ("fp32", "bf16", "pure_bf16")
QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "int4": {"load_in_4bit": True},
}
FORMATS = (*TRAINED, *QUANTIZED)
logger = get_logger(__name__)

_MIXED = "bf16"
_BLOCK, _LEVELS = 64, 16  # weights a scale of 4-bit weights has, and values that they may take
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """What one process holds of a model.

    Attributes:
        format: of its weights: "fp32"; "bf16" (mixed precision); "pure_bf16", with gradients and
            optimizer state in bf16, as torch.optim keeps it (`precision=bf16_weights` of a recipe
            has moments in fp32: 4 bytes a weight more); "int8" and "int4", whose linear layers are
            frozen.
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
        ConfigError: for a format, strategy or optimizer that does not exist, or where there is no
            estimate at all.

    Returns:
        Those that there are: quantized layers are replicated, and need linear layers. There is a
        warning of each format of `formats` that the model or none of the strategies has.
    """
    known = {layout.name: layout for layout in layouts()}
    chosen = list(known) if strategies is None else strategies
    wanted = FORMATS if formats is None else formats
    for where, given, names in (("format", wanted, FORMATS), ("strategy", chosen, known)):
        for value in given:
            if value == "fp8" and where == "format":
                rule = "products alone are in 8 bits: weights, gradients and moments stay in fp32"
                raise ConfigError.of("format='fp8'", rule, "Choose format='fp32'.")
            if value not in names:
                raise ConfigError(unknown_choice(where, value, names))
    if num_processes < 1:
        raise ConfigError.of(f"num_processes={num_processes}", "it is at least 1", "Give 8, say.")
    kind = _optimizer(optimizer)
    found: list[Estimate] = []
    absent: list[Problem] = []
    for format in wanted:
        rows = [_one(model, format, known[name], num_processes, kind) for name in chosen]
        there = [row for row in rows if row is not None]
        absent += [] if there else [_absent(format, chosen)]
        found += there
    if not found:
        raise ConfigError(*absent)
    for problem in absent if formats is not None else ():
        logger.warning("There is no estimate: %s", problem)
    return found


def _one(
    model: nn.Module,
    format: str,
    layout: MemoryLayout,
    num_processes: int,
    kind: type[torch.optim.Optimizer],
) -> Estimate | None:
    """Return the estimate of a format and a strategy; None where nothing trains so."""
    if format in QUANTIZED:
        return None if layout.sharded else _quantized(model, format, layout, num_processes)
    if _never(format, layout):
        return None
    return _trained(model, format, layout, num_processes, kind)


def _absent(format: str, strategies: Sequence[str]) -> Problem:
    """Return why there is no estimate of a format for some strategies."""
    value = f"format={format!r} with strategy={', '.join(strategies)}"
    replicated = [layout.name for layout in layouts() if not layout.sharded]
    if format not in QUANTIZED:
        rule = "weights in bf16 have fp32 master weights there"
        return Problem(value, rule, f"Choose format={_MIXED!r}, or a strategy without them.")
    if not set(strategies) & set(replicated):
        remedy = f"Choose strategy={' or '.join(replicated)}."
        return Problem(value, "quantized layers are replicated", remedy)
    rule = "linear layers (torch.nn.Linear) but the last are quantized, and the model has none"
    return Problem(value, rule, f"Choose one of {', '.join(TRAINED)}.")


def _never(format: str, layout: MemoryLayout) -> bool:
    """Return whether nothing trains so: weights in bf16 have master weights there."""
    return format == "pure_bf16" and layout.casts_weights


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
    casts = format == _MIXED and layout.casts_weights
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
    sizes = {name: tensor.numel() * weights.itemsize for name, tensor in _tensors(model)}
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
    return state_bytes(made, ghosts)


def _buffer_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes of the buffers, floating ones in a dtype if one is given."""
    return sum(
        buffer.numel()
        * (dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype).itemsize
        for buffer in model.buffers()
    )


def _quantized(
    model: nn.Module, format: str, layout: MemoryLayout, num_processes: int
) -> Estimate | None:
    config = BnbQuantizationConfig(**QUANTIZED[format])
    bits = {f"{name}.weight" for name in to_quantize(model, config)}
    if not bits:
        return None
    other = config.torch_dtype.itemsize
    sizes = {
        name: _quantized_bytes(tensor, format) if name in bits else tensor.numel() * other
        for name, tensor in _tensors(model)
    }
    kept = {name for name, _ in model.named_parameters()}  # a tied weight under its first name
    held = sum(size for name, size in sizes.items() if name in kept)
    footprint = Footprint(held + _buffer_bytes(model, config.torch_dtype), 0, 0)
    return Estimate(format, layout.name, num_processes, footprint, _largest(model, sizes))


def _quantized_bytes(weight: torch.Tensor, format: str) -> int:
    """Return the bytes of a weight [out, in] of a linear layer, with its scales."""
    if format == "int8":
        return weight.numel() + 4 * len(weight)
    return -(-weight.numel() // 2) + 4 * -(-weight.numel() // _BLOCK) + 4 * _LEVELS


def _tensors(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


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
