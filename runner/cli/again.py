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
from runner.exit_codes import DONE, INTERRUPTED, STOPPED
from runner.recipe import processes, trust

if TYPE_CHECKING:
    from runner.recipe.composition import Examined
    from runner.runs.record import RunRecord


# Overrides of these keys leave the weights as they are.
SAME_WEIGHTS = ("name", "output_dir", "run_dir", "tags", "tracker", "profile")


def main(arguments: Sequence[str]) -> int:
    """Make runs again, each from its frozen recipe in a directory of its own.

    Returns:
        The exit code of the run; of several, the highest.

    Raises:
        ConfigError: if a directory is no run, its recipe is refused, or a package is not trusted.
    """
    from runner.runs import discovery

    parser = CommandParser(
        prog="runner again",
        description="Run again what a run directory describes: its frozen recipe, in a new "
        "directory. Differences of code, versions and data are said.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run, or a sweep: all its jobs")
    changes = parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="changes of the recipe"
    )
    changes.required = False  # argparse names it among what is missing
    parser.add_argument("--dry-run", action="store_true", help="say what differs, and stop")
    sweeping = [flag for flag in arguments if flag in ("-m", "--multirun")]
    if sweeping:
        rule = "a run is made again once, with one value for each key"
        remedy = (
            "Leave it out; for a sweep, give the command of the run again with -m "
            "(runner show RUN_DIR prints it): runner -m seed=0,1 …"
        )
        raise ConfigError.of(f"runner again {sweeping[0]}", rule, remedy)
    found = parser.parse_intermixed_args(list(arguments))
    runs = discovery.require_runs([found.run_dir])
    place = processes.adopted()
    if place is not None and len(runs) > 1 and not found.dry_run:
        value = f"runner again with {len(runs)} runs on processes of a launcher"
        rule = "each run is made in processes of its own"
        raise ConfigError.of(value, rule, "Start it without torchrun, mpirun or srun.")
    if place is not None and place.rank > 0:
        from runner.launch import launcher

        return DONE if found.dry_run else launcher.follow(place)
    prepared = [_prepared(run, found.overrides) for run in runs]
    _require(prepared)
    if len(runs) == 1 or found.dry_run:
        return max([_made(one, found, fresh=False) for one in zip(runs, prepared, strict=True)])
    return _all_made(list(zip(runs, prepared, strict=True)), found)


def _made(one: tuple[RunRecord, Examined], found: argparse.Namespace, *, fresh: bool) -> int:
    run, examined = one
    _tell(run, examined, found.overrides)
    return DONE if found.dry_run else _start(run, examined, found.overrides, fresh)


def _all_made(runs: Sequence[tuple[RunRecord, Examined]], found: argparse.Namespace) -> int:
    """Make runs again one after the other until a signal comes, and return the highest code.

    A signal may come too late for the run that it meets, which is complete then.
    """
    from runner.launch.worker_group import StopSignals

    codes: list[int] = []
    with StopSignals().installed() as stops:
        for one in runs:
            if not stops.received:
                codes.append(_made(one, found, fresh=True))
            if stops.received or codes[-1] in (STOPPED, INTERRUPTED):
                break
    left = len(runs) - len(codes)
    if left:
        print(f"{left} of {len(runs)} runs are not begun.", file=sys.stderr)
    return max([*codes, STOPPED]) if left and stops.received else max(codes)


def _prepared(run: RunRecord, overrides: Sequence[str]) -> Examined:
    from runner.recipe import composition, diagnose, hydra_setup
    from runner.runs import directory
    from runner.runs.job import Job

    refused = [o for o in overrides if hydra_setup.key_of(o) == "resume"]
    if refused:
        rule = "a run that is made again is a new one"
        raise ConfigError.of(refused[0], rule, f"To go on with the run: runner {refused[0]}.")
    Job.load(run.path)  # its packages are trusted here, or refused
    for line in diagnose.overridden(overrides):
        print(line, file=sys.stderr)
    with hydra_setup.session():
        examined = composition.again(directory.frozen(run.path), diagnose.unique(overrides))
    return replace(examined, recipe=replace(examined.recipe, resume=None))


def _require(prepared: Sequence[Examined]) -> None:
    from runner.training import build, run_log

    run_log.announce(prepared[0].recipe.name)
    build.require(prepared, trust.missing_packages())


def _tell(run: RunRecord, examined: Examined, overrides: Sequence[str]) -> None:
    """Print what was compared with the machine and the work tree of today, and what differs."""
    from runner.reporting.run_table import relative
    from runner.runs import environment, reproduction

    now = environment.describe(examined.recipe.data)
    print(f"again: {relative(run.path)}")
    for subject, sentences in reproduction.compare(run.path, run.environment, now).items():
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


def _start(run: RunRecord, examined: Examined, overrides: Sequence[str], fresh: bool) -> int:
    from runner.launch import member, rendezvous, start_run
    from runner.runs import numerics, reproduction

    if rendezvous.is_member(examined.recipe.distributed):
        return member.follow(examined.recipe)
    claimed: list[Path] = []
    with numerics.read(run.path).threads_exported(), rendezvous.ending_with() as ended:
        code = ended(
            start_run.start(
                examined.recipe,
                examined.overrides,
                examined.config_name,
                fresh=fresh,
                on_claimed=claimed.append,
                log_levels=examined.log_levels,
            )
        )
    verdict = ""
    if code == DONE and claimed and not any(map(_may_change_weights, overrides)):
        verdict = reproduction.weights_verdict(run.path, claimed[0])
    if verdict:
        print(verdict)
    return code
