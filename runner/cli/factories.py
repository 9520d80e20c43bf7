"""Command line of ``runner factories``: what a recipe can name, with arguments and defaults."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from accel.machine.errors import ConfigError, nearest
from runner.cli import help
from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE
from runner.recipe import paths, trust
from runner.recipe.factory import Factory, factory_of, register
from runner.recipe.keys import NAMED_NODES

RECIPES = "recipes"
FACTORY_KEYS = ("name", "_target_")
# The group of `conf/` for each word of the command line; all but that of recipes have a registry.
KINDS = {
    **{
        "models": "model",
        "peft": "peft",
        "data": "data",
        "objectives": "objective",
        "steps": "step",
    },
    **{"optimizers": "optimizer", "schedules": "scheduler", "callbacks": "callbacks"},
    "metrics": "metrics",
    RECIPES: "experiment",
}


@dataclass(frozen=True)
class Entry:
    """What a recipe can name: a line about it, its arguments, and everything."""

    summary: str
    arguments: str
    text: str


def main(arguments: Sequence[str]) -> int:
    """Print what recipes can name: everything, or a kind with arguments, or one in full.

    Raises:
        ConfigError: for a kind or a name that is not there; the message names the nearest.
    """
    parser = CommandParser("factories", "List what a recipe can name.")
    parser.add_argument("kind", metavar="KIND", nargs="?", help=", ".join(KINDS))
    parser.add_argument("name", metavar="NAME", nargs="?", help="one of them, in full")
    found = parser.parse_args(list(arguments))
    if found.kind not in (None, *KINDS):
        rule = "there is no such kind of factories"
        raise ConfigError.of(f"factories {found.kind}", rule, nearest(found.kind, KINDS))
    trust.import_packages()
    for kind in [found.kind] if found.kind else KINDS:
        entries = listed(kind)
        if found.name is not None:
            if found.name not in entries:
                value, rule = f"factories {kind} {found.name}", f"none of the {kind} has that name"
                raise ConfigError.of(value, rule, nearest(found.name, entries))
            print(entries[found.name].text)
            continue
        print(kind)
        for name, entry in sorted(entries.items()):
            print("\n".join(help.entry(name, entry.summary, 22)))
            if found.kind and entry.arguments:
                print(textwrap.indent(textwrap.fill(entry.arguments, help.WIDTH - 22), " " * 22))
    return DONE


def listed(kind: str) -> dict[str, Entry]:
    """Return what recipes can name of a kind: registered factories, and what files choose."""
    group = KINDS[kind]
    files = {path.stem: path for path in _files(group)}
    if kind == RECIPES:
        return {name: _recipe(path.read_text(encoding="utf-8")) for name, path in files.items()}
    registry = getattr(register, group.removesuffix("s"))
    found = {name: factory_of(group, {"name": name}, registry) for name in registry.names()}
    choices: dict[str, list[str]] = {}
    for stem, path in files.items():
        for name, node in _nodes(path, stem):
            if "_target_" in node:
                found[name] = factory_of(group, node, registry)
            values = (f"{key}={value}" for key, value in node.items() if key not in FACTORY_KEYS)
            choices.setdefault(name, []).append(f"{group}={stem}  {', '.join(values)}".rstrip())
    return {name: _entry(made, choices.get(name, ())) for name, made in found.items()}


def _files(group: str) -> Iterator[Path]:
    for folder in [paths.conf_folder(), *paths.project_conf_folders()]:
        yield from sorted((folder / group).glob("*.yaml"))


def _nodes(path: Path, stem: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the nodes of a file, each with the name of its factory."""
    content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    nodes = content or {} if path.parent.name in NAMED_NODES else {stem: content}
    for key, node in nodes.items():
        if isinstance(node, Mapping):
            yield str(node.get("name", key)), node


def _entry(made: Factory, choices: Sequence[str]) -> Entry:
    text = inspect.getdoc(made.function) or ""
    parameters = ", ".join(map(str, made.signature.parameters.values()))
    parameters = parameters.replace("collections.abc.", "")
    chosen = [f"  {line}" for line in choices or [f"{made.key}.name={made.label}"]]
    place = f"{made.function.__module__}.{getattr(made.function, '__qualname__', made.label)}"
    parts = [f"{place}({parameters})", text, "\n".join(["Choose it by", *chosen])]
    return Entry(text.partition("\n")[0], parameters, "\n\n".join(filter(None, parts)))


def _recipe(text: str) -> Entry:
    about = [line for line in text.splitlines() if line.startswith("# ") and line[2] != "@"]
    return Entry("".join(about[:1]).removeprefix("# "), "", text.rstrip())
