"""Command line of ``runner again``: a new run of what a run directory describes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine.errors import ConfigError
from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE
from runner.recipe import processes, trust

if TYPE_CHECKING:
    from runner.recipe.composition import Examined
    from runner.runs.record import RunRecord


# Overrides of these keys leave the weights as they are.
SAME_WEIGHTS = ("name", "output_dir", "run_dir", "tags", "tracker", "profile")


def main(arguments: Sequence[str]) -> int:
    """Make a run again from its frozen recipe, in a directory of its own; return its exit code.

    Raises:
        ConfigError: if the directory is no run, its recipe is refused, or a package is not trusted.
    """
    from runner.launch import launcher
    from runner.runs import record
    from runner.training import build, run_log

    found = _parse(arguments)
    runs = record.require_runs([found.run_dir])
    if len(runs) > 1:
        rule = f"one run is made again, and {found.run_dir} holds {len(runs)}"
        remedy = "Name one of them. The command of a sweep (runner show RUN_DIR) makes it again."
        raise ConfigError.of(f"runner again {found.run_dir}", rule, remedy)
    place = processes.adopted()
    if place is not None and place.rank > 0:
        return DONE if found.dry_run else launcher.follow(place)
    examined = _prepared(runs[0], found.overrides)
    run_log.announce(examined.recipe.name)
    build.require([examined], trust.missing_packages())
    _tell(runs[0], examined, found.overrides)
    return DONE if found.dry_run else _start(runs[0], examined, found.overrides)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    description = "Train once more by the recorded recipe of a run, in a directory of its own."
    parser = CommandParser("again", description)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="changes of the recipe")
    parser.add_argument("--dry-run", action="store_true", help="say what differs, and stop")
    return parser.parse_intermixed_args(list(arguments))


def _prepared(run: RunRecord, overrides: Sequence[str]) -> Examined:
    from runner.cli import program
    from runner.recipe import composition, hydra_setup
    from runner.runs import directory
    from runner.runs.job import Job

    refused = [o for o in overrides if hydra_setup.key_of(o) == "resume"]
    if refused:
        rule = "a run that is made again is a new one"
        raise ConfigError.of(refused[0], rule, f"To go on with the run: runner {refused[0]}.")
    Job.load(run.path)  # its packages are trusted here, or refused
    with hydra_setup.session():
        found = composition.again(directory.frozen(run.path), program.last_of_each(overrides))
    return replace(found, recipe=replace(found.recipe, resume=None))


def _tell(run: RunRecord, examined: Examined, overrides: Sequence[str]) -> None:
    """Print what was compared with the machine and the work tree of today, and what differs."""
    from runner.reporting.run_table import relative
    from runner.runs import environment

    now = environment.describe(examined.recipe.data)
    print(f"again: {relative(run.path)}")
    for subject, sentences in environment.compare(run.path, run.environment, now).items():
        for sentence in sentences:
            print(f"  ≠ {subject:<10} {sentence}")
        if not sentences:
            print(f"    {subject:<10} as recorded")
    if overrides:
        print(f"  ≠ {'overrides':<10} {' '.join(overrides)}")
    sys.stdout.flush()


def _may_change_weights(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0].partition(".")[0]
    return key not in SAME_WEIGHTS


def _start(run: RunRecord, examined: Examined, overrides: Sequence[str]) -> int:
    from runner.launch import nodes, start_run
    from runner.runs import directory, numerics

    if nodes.is_member(examined.recipe.distributed):
        return start_run.join(examined.recipe)
    claimed: list[Path] = []
    with numerics.read(run.path).exported():  # as many threads, unless the recipe says otherwise
        code = start_run.start(examined, on_claimed=claimed.append)
    verdict = ""
    if code == DONE and claimed and not any(map(_may_change_weights, overrides)):
        verdict = directory.weights_verdict(run.path, claimed[0])
    if verdict:
        print(verdict)
    return code
