"""Shell completion: commands, flags, runs, and what Hydra completes: groups, files and keys.

``runner -sc query=bash`` (or fish) reads the line from COMP_LINE and prints the candidates for its
last word. It never prints an error, and imports torch only for a name behind ``runner factories
KIND`` or where a user's package does.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from runner.cli import factories
from runner.cli.arguments import long_flags
from runner.recipe import hydra_setup
from runner.recipe.keys import COMMANDS, OF_RECIPES
from runner.runs import sessions
from runner.sweep import plan

MOST_RUNS = 50
SWEEP_KEYS = tuple(f"{plan.PREFIX}.{name}=" for name in plan.REMEDIES)


def candidates(line: str) -> list[str]:
    """Return the completions of the last word of a command line, sorted.

    Args:
        line: as typed, the program's name included; where it ends in a space, a new word begins.
    """
    found: set[str] = set()
    # Errors in the line are reported when it is run, not while it is typed.
    with contextlib.suppress(Exception), hydra_setup.session():
        words = shlex.split(line)
        word = "" if line[-1].isspace() else words.pop()
        of_program = 3 if words[1:2] == ["-m"] else 1
        for candidate in _candidates(words[of_program:], word):
            if candidate.startswith(word):
                found.add(candidate)
    return sorted(found)


def _candidates(words: Sequence[str], word: str) -> Iterator[str]:
    command = next(iter(words), "")
    if word.startswith("-"):
        yield from () if command in COMMANDS else long_flags()
    elif command == "factories":
        yield from factories.listed(words[1]) if words[1:] else factories.KINDS
    elif command == "data" and not words[1:]:
        yield from ("show", "tokenizer")
    elif command in COMMANDS and command not in (*OF_RECIPES, "new", "data") and "=" not in word:
        yield from _runs(word)
    elif word.startswith("resume="):
        yield "resume=auto"
        yield from (f"resume={run}" for run in _runs(word.removeprefix("resume=")))
    else:
        yield from () if words else COMMANDS
        yield from SWEEP_KEYS if {"-m", "--multirun"} & set(words) else ()
        given = [one for one in words if "=" in one and not one.startswith("-")]
        hydra = DefaultCompletionPlugin(GlobalHydra.instance().config_loader())
        yield from hydra._query(hydra_setup.PRIMARY, " ".join([*given, word]))


def _runs(word: str) -> Iterator[str]:
    """Yield run directories: those below the folder that is being typed, else below ``runs``."""
    typed = Path(word).expanduser()
    folder = (typed if word.endswith("/") else typed.parent) if word else Path("runs")
    found = [path for depth in range(4) for path in folder.glob("*/" * depth + sessions.FOLDER)]
    newest = sorted((path.parent for path in found), key=lambda run: run.name, reverse=True)
    yield from (str(run) for run in newest[:MOST_RUNS])
