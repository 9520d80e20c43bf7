"""The flags of the command line, wherever they stand on it. Free of torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from accel import commands
from accel.machine.errors import ConfigError, Problem, nearest
from runner.recipe import keys

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class Exit(Exception):
    """The command ends with `code`; what there is to say has been printed."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError.of("command line", message, "See runner --help.")


def _parser() -> _Parser:
    parser = _Parser(prog="runner", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("overrides", nargs="*")
    add("-h", "--help", action="store_true")
    add("--version", action="store_true")
    add("-m", "--multirun", action="store_true")
    add("--dry-run", action="store_true")
    add("-c", "--cfg", choices=["job", "hydra", "all"])
    add("-p", "--package")
    add("--resolve", action="store_true")
    add("-cn", "--config-name", default="config")
    add("-cd", "--config-dir", action="append", default=[])
    add("-sc", "--shell-completion", action="store_true")
    add("-i", "--info", nargs="?", const="all", choices=INFO)
    add("--hydra-help", action="store_true")
    return parser


class CommandParser(commands.CommandParser):
    """The parser of a subcommand.

    It raises `Exit` instead of exiting: a SystemExit can only come from the user's code.
    """

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"runner {command}", description=description, allow_abbrev=False)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        raise Exit(status)


def long_flags() -> list[str]:
    """Return the flags, in their long spelling."""
    names = (name for action in _parser()._actions for name in action.option_strings)
    return sorted([*(name for name in names if name.startswith("--")), "--import"])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return flags and overrides.

    Raises:
        ConfigError: for a flag that is not known; the message names the nearest.
    """
    refused = [flag for flag in arguments if flag.partition("=")[0] in ("-cp", "--config-path")]
    if refused:
        rule = "the shipped files stay where they are"
        remedy = "Add a folder of your own with --config-dir DIR; ./conf is read anyway."
        raise ConfigError.of(refused[0], rule, remedy)
    parser = _parser()
    known, unknown = parser.parse_known_intermixed_args(list(arguments))
    flags = [name for action in parser._actions for name in action.option_strings]
    problems = [
        _unknown(flag, arguments, [*flags, "--import"]) for flag in unknown if flag.startswith("-")
    ]
    problems += [
        Problem(f"--config-dir {folder}", "there is no such folder", "Correct it.")
        for folder in known.config_dir
        if not Path(folder).is_dir()
    ]
    if known.cfg is None and (known.resolve or known.package):
        flag = "--resolve" if known.resolve else "--package"
        problems += [Problem(flag, "it says how --cfg prints", "Add --cfg job, or leave it out.")]
    ConfigError.raise_if(problems)
    return known


def _unknown(flag: str, arguments: Sequence[str], flags: Sequence[str]) -> Problem:
    name, given, value = flag.partition("=")
    rule = "there is no such flag"
    key = keys.key_for(name)
    if key is None:
        return Problem(flag, rule, nearest(name, flags))
    following = list(arguments[arguments.index(flag) + 1 :])[:1] if flag in arguments else []
    if not given and following and "=" not in following[0] and not following[0].startswith("--"):
        value = following[0]
    return Problem(flag, rule, f"Keys have no dashes: write {key}={value or '…'}")


def searched(flags: argparse.Namespace) -> list[str]:
    """Return the overrides of a command line, with the folders that ``--config-dir`` adds."""
    folders = ",".join(f"'file://{Path(folder).resolve()}'" for folder in flags.config_dir)
    return [*flags.overrides, *([f"hydra.searchpath=[{folders}]"] if folders else [])]


def take_imports(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the packages that ``--import`` names, and the other arguments."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    known, rest = parser.parse_known_args(list(arguments))
    named = [name for value in known.imports for name in str(value).split(",") if name]
    return named, rest


def for_hydra(flags: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Return the command line that Hydra gets, flags first."""
    from runner.recipe import hydra_setup

    line = ["--config-name", flags.config_name]
    switches = ("multirun", "shell_completion", "hydra_help", "resolve")
    line += [f"--{name.replace('_', '-')}" for name in switches if getattr(flags, name)]
    for name in ("cfg", "package", "info"):
        if getattr(flags, name):
            line += [f"--{name}", getattr(flags, name)]
    with hydra_setup.session():
        return [*line, *hydra_setup.for_hydra(overrides), *hydra_setup.FIXED]
