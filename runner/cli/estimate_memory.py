"""Command line of ``runner estimate-memory``."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]

from accel.logging import silenced
from accel.machine.errors import ConfigError, text_of
from accel.machine.imports import require
from runner.cli.arguments import CommandParser
from runner.recipe import trust
from runner.run_dir.json_files import JsonObject

if TYPE_CHECKING:
    from torch import nn

    from accel.commands.model_memory import Estimate

CONFIG = "config.json"
COLUMNS = ("format", "strategy", "weights", "gradients", "optimizer", "total", "largest")


def main(arguments: Sequence[str]) -> int:
    """Print what a process would hold of a model, by format of its weights and strategy.

    Raises:
        ConfigError: if there is no such model, format, strategy or optimizer.
    """
    parser = CommandParser(
        prog="runner estimate-memory",
        description="Estimate the memory of a model's weights, gradients and optimizer state.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"a folder with a {CONFIG} of transformers, or a factory")
    add("arguments", metavar="KEY=VALUE", nargs="*", help="arguments of the factory")
    add("--num_processes", "--num-processes", type=int, default=1, metavar="N")
    add("--format", action="append", help="fp32, bf16, pure_bf16, int8, int4 (may be repeated)")
    add("--strategy", action="append", help="how it is distributed (may be repeated)")
    add("--optimizer", default="AdamW", help="class of torch.optim (default: AdamW)")
    add("--json", action="store_true", help="print JSON, with bytes")
    found = parser.parse_intermixed_args(list(arguments))
    model = _model(found.model, found.arguments)
    from accel.commands import model_memory

    estimates = model_memory.estimates(
        model,
        found.num_processes,
        found.format,
        found.strategy,
        found.optimizer,
    )
    if found.json:
        print(json.dumps([_plain(one) for one in estimates], indent=2))
    else:
        _show(model, found.model, found.num_processes, found.optimizer, estimates)
    return 0


def _plain(estimate: Estimate) -> dict[str, object]:
    fields = dataclasses.asdict(estimate)
    footprint = fields.pop("footprint")
    return {**fields, **footprint, "total": estimate.total}


def _show(
    model: nn.Module, name: str, num_processes: int, optimizer: str, estimates: Sequence[Estimate]
) -> None:
    from rich import box
    from rich.table import Table

    from runner.recipe.format_counts import counted, size
    from runner.training.console import PipedConsole

    def shown(num_bytes: int | None) -> str:
        return "?" if num_bytes is None else "–" if num_bytes == 0 else size(num_bytes)

    weights = sum(parameter.numel() for parameter in model.parameters())
    processes = counted(num_processes, "process", "processes")
    title = f"{Path(name).name} · {weights:,} parameters · {optimizer}, a process of {processes}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for one in estimates:
        held = one.footprint
        sizes = (held.parameters, held.gradients, held.optimizer_state, one.total)
        table.add_row(one.format, one.strategy, *map(shown, (*sizes, one.largest_layer)))
    console = PipedConsole(highlight=False)
    console.print(table)
    console.print(
        "On top come activations, and the largest layer where weights are gathered.", style="dim"
    )
    if any(one.format == "pure_bf16" for one in estimates):
        console.print(
            "pure_bf16 has optimizer state in bf16, too; precision=bf16_weights has it in fp32: "
            "4 bytes a weight more.",
            style="dim",
        )


# -- the model -----------------------------------------------------------------------------


def _model(name: str, arguments: Sequence[str]) -> nn.Module:
    """Return the model, its parameters on the meta device."""
    path = Path(name).expanduser()
    if path.exists():
        if arguments:
            rule, remedy = f"{CONFIG} has all that is to know", "Change it there."
            raise ConfigError.of(" ".join(arguments), rule, remedy)
        return _of_transformers(path.parent if path.name == CONFIG else path)
    trust.import_packages()
    from accel.weights.tensors import init_empty_weights
    from runner.recipe.factory import factory_of
    from runner.recipe.registry import register

    dotted = "." in name and os.sep not in name
    if not dotted and name not in register.model.names():
        rule = f"there is no such folder, and the model factories are {register.model.names()}"
        remedy = f"Name the folder of a {CONFIG}, or a trusted package.module.factory."
        raise ConfigError.of(name, rule, remedy)
    node = {"_target_" if dotted else "name": name, **_parsed(arguments)}
    factory = factory_of("model", node, register.model)
    ConfigError.raise_if(factory.problems())
    with init_empty_weights(include_buffers=False):
        made: nn.Module = factory()
    return made


def _parsed(arguments: Sequence[str]) -> JsonObject:
    found = {}
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
    transformers = require("transformers", f"runner estimate-memory {folder}", extra="examples")
    from accel.precision.fp8 import CHATTY
    from accel.weights.tensors import init_empty_weights

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
