"""The console script `accel`: its subcommands, and those of them that are a few lines long."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.commands import CommandParser
from accel.machine.errors import AccelError, ConfigError, MissingPackageError
from accel.machine.imports import load_attribute

COMMANDS = {
    "launch": ("accel.commands.launch:main", "start a script on all devices of this machine"),
    "config": ("accel.commands.launch_config:main", "write the settings of `accel launch`"),
    "env": ("accel.commands.program:show_environment", "describe this machine"),
    "merge-weights": ("accel.commands.program:merge", "merge sharded weights into one file"),
    "estimate-memory": (
        "accel.commands.estimate_memory:main",
        "estimate the memory of weights, gradients and optimizer state",
    ),
}
PACKAGES = ("accel-runner", "torch", "numpy", "safetensors")
DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: without the program's name; None: those of the process.

    Returns:
        0 done, 1 failed, 2 refused, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    found = _parser().parse_args(given[:1])
    try:
        return int(load_attribute(COMMANDS[found.command][0])(given[1:]))
    except (ConfigError, MissingPackageError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    except AccelError as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<16} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    parser = CommandParser(
        prog="accel",
        usage="accel COMMAND …",
        description="\n".join(["commands (accel COMMAND --help has the flags):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def show_environment(arguments: Sequence[str]) -> int:
    """Print versions, devices and the settings of `accel launch`, for a bug report."""
    import torch

    from accel.commands import launch_config
    from accel.strategies.table import specs

    parser = CommandParser(prog="accel env", description="Describe this machine.")
    launch_config.add_file(parser)
    path = launch_config.file_of(parser.parse_args(list(arguments)))
    of_strategies = [package for spec in specs() for package in spec.packages]
    shown = {
        "platform": platform.platform(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        **{name: _version(name) for name in (*PACKAGES, *of_strategies)},
        "accelerator": _accelerator(torch),
        "settings": str(path) if path.is_file() else f"none ({path} does not exist)",
    }
    for name, value in shown.items():
        print(f"{name:<14} {value}")
    for key, setting in launch_config.load(path).items() if path.is_file() else ():
        print(f"  {key}: {setting}")
    return DONE


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


def merge(arguments: Sequence[str]) -> int:
    """Merge sharded weights into one file.

    Raises:
        CheckpointError: if there are no such weights, or they cannot be read.
    """
    from accel.weights.files import merge_weights

    parser = CommandParser(prog="accel merge-weights", description="Merge sharded weights.")
    parser.add_argument("checkpoint_directory", type=Path, help="directory of sharded weights")
    parser.add_argument("output_path", type=Path, help="folder of the merged file")
    for name, what in (
        ("unsafe_serialization", "write pytorch_model.bin instead of model.safetensors"),
        ("remove_checkpoint_dir", "delete the directory afterwards"),
    ):
        spellings = (f"--{name}", f"--{name.replace('_', '-')}")
        parser.add_argument(*spellings, action="store_true", help=what)
    found = parser.parse_args(list(arguments))
    merge_weights(
        found.checkpoint_directory,
        found.output_path,
        not found.unsafe_serialization,
        found.remove_checkpoint_dir,
    )
    print(f"Merged weights written to {found.output_path}")
    return DONE
