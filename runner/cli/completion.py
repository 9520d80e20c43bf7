"""Shell completion: commands, flags, groups, keys, arguments of factories, runs.

``runner -sc query=bash`` (or fish) reads the line from COMP_LINE and prints the candidates for its
last word. It never prints an error, and never imports torch unless a user's package does.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accel.machine.imports import is_available
from runner.cli.arguments import INFO, long_flags
from runner.recipe import (
    diagnose,
    hydra_setup,
    keys,
    launchers,
    nodes,
    sweepers,
    trust,
)
from runner.recipe.factory import nodes_of, num_given, read
from runner.recipe.keys import COMMANDS
from runner.recipe.registry import register
from runner.recipe.schema import SPLITS
from runner.recipe.serialization import examine
from runner.runs import sessions
from runner.runs.record import STATUSES
from runner.sweep import settings

OF_COMMANDS = {
    "eval": ("--split", "--checkpoint", "--processes", "--help"),
    "predict": ("--split", "--checkpoint", "--output", "--processes", "--help"),
    "list": (*("--sort", "--reverse", "--limit", "--columns", "--json", "--csv", "--help"),),
    "show": ("--json", "--help"),
    "compare": ("--json", "--help"),
    "report": ("--output", "--help"),
    "again": ("--dry-run", "--help"),
    "submit": ("--dry-run", "--help"),
}
VALUES = {
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
    "--info": INFO,
    "-i": INFO,
    "--split": SPLITS,
    "--checkpoint": ("best", "last"),
}
HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper")
OF_OPTUNA = {f"{sweepers.NODE}.{kind}": kind for kind in ("sampler", "pruner")}
MOST_RUNS = 50
SWEEP_KEYS = tuple(f"{settings.PREFIX}.{name}=" for name in settings.KEYS)
OF_RUNS = ("eval", "list", "show", "compare", "report")  # each of their words may be a run
FILTERS = ("name=", "since=", "status=", "tag=")


def candidates(line: str) -> list[str]:
    """Return the completions of the last word of a command line, sorted.

    Args:
        line: as typed, the program's name included; where it ends in a space, a new word begins.
    """
    words, word = _words(line)
    found: set[str] = set()
    # Errors in the line are reported when it is run, not while it is typed.
    with contextlib.suppress(Exception), hydra_setup.session():
        with contextlib.suppress(Exception):  # a package of the user's
            trust.import_packages()
        for candidate in _candidates(words, word):
            if candidate.startswith(word):
                found.add(candidate)
    return sorted(found)


def _words(line: str) -> tuple[list[str], str]:
    """Return the words before the last one, without the program's name, and the last one."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is still open
        words = line.split()
    last = "" if not words or line[-1].isspace() else words.pop()
    if words and Path(words[0]).name.startswith("python"):
        words = words[3:] if words[1:2] == ["-m"] else words[2:]
    else:
        words = words[1:]
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word not in ("--import",) and not word.startswith("--import="):
            kept.append(word)
        skip = word == "--import"
    return kept, last


def _candidates(words: Sequence[str], word: str) -> Iterator[str]:
    before = words[-1] if words else ""
    command = words[0] if words and words[0] in COMMANDS else None
    if before in VALUES:
        yield from VALUES[before]
        return
    if before in ("--output", "--config-dir", "-cd", "--package", "-p"):
        return
    if word.startswith("-"):
        yield from OF_COMMANDS[command] if command else long_flags()
        return
    if command in ("list", "report") and word:
        yield from FILTERS
        yield from (f"status={status}" for status in STATUSES)
    if command in OF_RUNS and "=" not in word:
        yield from _runs(word)
    if command in OF_RUNS[1:]:
        return
    if command == "submit":
        command, words = None, words[1:]
    if command and len([w for w in words[1:] if "=" not in w and not w.startswith("-")]) == 0:
        yield from _runs(word)
        return
    if not words:
        yield from COMMANDS
    yield from _overrides(words, word)


def _overrides(words: Sequence[str], word: str) -> Iterator[str]:
    key, given, value = word.partition("=")
    prefix = key[: len(key) - len(key.lstrip("+~"))]
    key = key[len(prefix) :]
    if given:
        yield from (f"{prefix}{key}={found}" for found in _values(key, value))
        return
    yield from (f"{prefix}{group}=" for group in hydra_setup.groups())
    if key.startswith("hydra"):
        yield from (f"{group}=" for group in HYDRA_GROUPS)
        yield from (f"{sweepers.NODE}.{name}=" for name in sweepers.DEFAULTS)
        yield from (f"{launchers.NODE}.{name}=" for name in launchers.DEFAULTS)
        return
    if {"-m", "--multirun"} & set(words):
        yield from SWEEP_KEYS
    recipe = _recipe([w for w in words if "=" in w and not w.startswith("-")])
    known = keys.known_keys(recipe)
    depth = key.count(".")
    for name in [*known, *_arguments(recipe)]:
        if name.count(".") == depth:
            inner = any(other.startswith(f"{name}.") for other in known)
            yield f"{prefix}{name}{'.' if inner else '='}"


def _recipe(overrides: Sequence[str]) -> dict[str, object]:
    """Return as much of the recipe as the words that are complete describe."""
    config, _, _ = diagnose.examine(list(overrides), hydra_setup.PRIMARY)
    return hydra_setup.plain(config)


def _arguments(recipe: Mapping[str, object]) -> Iterator[str]:
    """Yield the arguments of factories that have been imported: a torch-free line stays so."""
    for key, node, registry in nodes_of(examine(recipe)[0], []):
        name = node.get("name") if isinstance(node, Mapping) else None
        factory = registry.loaded(str(name))
        if factory is not None:
            names = read(factory, num_given(key, True)).parameters
            yield from (f"{key}.{argument}" for argument in names)


def _values(key: str, value: str) -> Iterator[str]:
    if key == "sweep.jobs":
        yield settings.AUTO
    elif key in (*hydra_setup.groups(), *HYDRA_GROUPS):
        yield from diagnose.options_of(key)
    elif key in OF_OPTUNA and is_available("optuna"):
        from runner.training import optuna_study

        yield from optuna_study.names(OF_OPTUNA[key])
    elif key == "resume":
        yield from ("auto", *_runs(value))
    elif key.endswith(".name"):
        node = key.removesuffix(".name")
        kind = "callback" if node.startswith("callbacks.") else node
        if hasattr(register, kind):
            yield from getattr(register, kind).names()
    elif key == "distributed.ray.placement":
        yield from nodes.PLACEMENTS
    elif keys.is_switch(key):
        yield from ("true", "false")


def _runs(word: str) -> Iterator[str]:
    """Yield run directories: those below the folder that is being typed, else below ``runs``."""
    typed = Path(word).expanduser()
    folder = typed if word.endswith("/") else typed.parent
    places = [folder] if word else [Path("runs")]
    for place in places:
        found = [path for depth in range(4) for path in place.glob("*/" * depth + sessions.FOLDER)]
        newest = sorted((path.parent for path in found), key=lambda run: run.name, reverse=True)
        yield from (str(run) for run in newest[:MOST_RUNS])
