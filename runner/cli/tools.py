"""Command lines of ``runner env``, ``runner config`` and ``runner merge-weights``."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accel.commands import launch_config
from accel.machine.enums import PrecisionType
from accel.machine.errors import ConfigError
from accel.strategies.table import specs
from runner.cli.arguments import CommandParser

PACKAGES = ("accel-runner", "torch", "numpy", "safetensors", "hydra-core", "omegaconf")
FILE_HELP = "the settings of `runner launch` (default: in HF_HOME, else ~/.cache/huggingface)"


def show_environment(arguments: Sequence[str]) -> int:
    """Print versions, devices and the settings of `runner launch`, for a bug report."""
    parser = CommandParser(prog="runner env", description="Describe this machine.")
    _add_file(parser)
    found = parser.parse_args(list(arguments))
    import torch

    path = _file(found)
    shown = {
        "platform": platform.platform(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        **{name: _version(name) for name in (*PACKAGES, *_packages_of_strategies())},
        "accelerator": _accelerator(torch),
        "settings": str(path) if path.is_file() else f"none ({path} does not exist)",
    }
    for name, value in shown.items():
        print(f"{name:<14} {value}")
    for key, setting in launch_config.load(path).items() if path.is_file() else ():
        print(f"  {key}: {setting}")
    return 0


def configure(arguments: Sequence[str]) -> int:
    """Write the settings of `runner launch`: by questions, for this machine, or brought up to date.

    Raises:
        ConfigError: if nobody answers, or the file to update cannot be read.
    """
    parser = CommandParser(prog="runner config", description="Write settings of runner launch.")
    what = "default: those of this machine; update: add keys that a file lacks"
    parser.add_argument("action", nargs="?", choices=("default", "update"), help=what)
    _add_file(parser)
    names = ("--mixed_precision", "--mixed-precision")
    parser.add_argument(*names, choices=PrecisionType.list(), default="no")
    found = parser.parse_args(list(arguments))
    path = _file(found)
    settings = launch_config.basic_config(found.mixed_precision)
    if found.action == "default" and path.exists():
        remedy = "Remove it first, or name another with --config_file; update adds keys to it."
        raise ConfigError.of(f"{path}", "it is there already", remedy)
    if found.action == "update":
        settings |= launch_config.load(path)
    elif found.action is None:
        settings |= _answers(settings)
    launch_config.write(settings, path)
    print(f"Settings written to {path}")
    return 0


def merge(arguments: Sequence[str]) -> int:
    """Merge sharded weights into one file.

    Raises:
        CheckpointError: if there are no such weights, or they cannot be read.
    """
    parser = CommandParser(prog="runner merge-weights", description="Merge sharded weights.")
    parser.add_argument("checkpoint_directory", help="directory of sharded weights")
    parser.add_argument("output_path", help="folder of the merged file")
    for name, what in (
        ("unsafe_serialization", "write pytorch_model.bin instead of model.safetensors"),
        ("remove_checkpoint_dir", "delete the directory afterwards"),
    ):
        spellings = (f"--{name}", f"--{name.replace('_', '-')}")
        parser.add_argument(*spellings, action="store_true", help=what)
    found = parser.parse_args(list(arguments))
    from accel.weights.files import merge_weights

    merge_weights(
        found.checkpoint_directory,
        found.output_path,
        not found.unsafe_serialization,
        found.remove_checkpoint_dir,
    )
    print(f"Merged weights written to {found.output_path}")
    return 0


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", "--config-file", type=Path, help=FILE_HELP)


def _file(found: argparse.Namespace) -> Path:
    path: Path | None = found.config_file
    return launch_config.default_config_file() if path is None else path


def _packages_of_strategies() -> list[str]:
    return [package for spec in specs() for package in spec.packages]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _accelerator(torch: Any) -> str:
    if not torch.accelerator.is_available():
        return "none"
    kind = torch.accelerator.current_accelerator().type
    names = [torch.get_device_module(kind).get_device_name(0)] if kind != "mps" else []
    return " · ".join([f"{torch.accelerator.device_count()} {kind}", *names])


def _answers(default: dict[str, object]) -> dict[str, object]:
    """Ask for the settings that people change; an empty answer takes the default."""
    answers: dict[str, object] = {}
    on_cpu = _ask("Compute on the CPU (yes, no)", default["use_cpu"], _boolean)
    answers["use_cpu"] = on_cpu
    answers["num_machines"] = _ask("Number of machines", 1, _positive)
    if answers["num_machines"] != 1:
        answers["machine_rank"] = _ask("Rank of this machine", 0, int)
        answers["main_process_ip"] = _ask("Address of the machine of rank 0", "127.0.0.1", str)
        answers["main_process_port"] = _ask("Port there", 29500, _positive)
    number = _ask("Number of processes on all machines", default["num_processes"], _positive)
    answers["num_processes"] = number
    known = [name for name, plugin in launch_config.strategies().items() if plugin.kind]
    question = f"Strategy (none, {', '.join(known)})"
    strategy = str(_ask(question, "none", _one_of(("none", *known))))
    if strategy in known:
        kind, answers[f"{strategy}_config"] = strategy.upper(), {}
    else:
        kind = "NO" if number == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"
    precision = _one_of(PrecisionType.list())
    answers["mixed_precision"] = _ask("Precision (no, fp16, bf16, fp8)", "no", precision)
    return {**answers, "distributed_type": kind}


def _ask(question: str, default: object, parse: Callable[[str], object]) -> object:
    while True:
        try:
            text = input(f"{question} [{default}]: ").strip()
        except EOFError:
            remedy = "Use runner config default, which asks nothing."
            raise ConfigError.of(f"{question}", "nobody answers", remedy) from None
        try:
            return parse(text) if text else default
        except ValueError as error:
            print(error)


def _boolean(text: str) -> bool:
    from accel.machine.env import parse_bool

    value = parse_bool(text)
    if value is None:
        raise ValueError(f"{text!r} is neither yes nor no")
    return value


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text} is less than 1")
    return int(text)


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in known:
            raise ValueError(f"{text!r} is none of {', '.join(known)}")
        return text.lower()

    return parse
