"""Command line of ``runner submit``: a run as a job on Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accel.machine.errors import ConfigError
from runner.cli import arguments as command_line
from runner.cli import program
from runner.exit_codes import DONE

USAGE = """\
usage: runner submit [submit.KEY=VALUE ...] [KEY=VALUE ...] [--dry-run]

Check a recipe here, freeze it in a run directory, and hand it to Slurm. Everything that is refused
is refused before anything is submitted.

  --dry-run     print the batch script, submit nothing
"""
SWEEP = "runner -m … hydra/launcher=submitit_slurm hydra.launcher.partition=…"


def main(arguments: Sequence[str]) -> int:
    """Submit a run, and print its job, its directory and how to follow it.

    Args:
        arguments: those behind ``submit``.

    Raises:
        ConfigError: if the recipe is refused, there is no Slurm, or it refuses the job.
    """
    from runner.launch import slurm
    from runner.training import build, run_log

    flags = command_line.parse(arguments)
    if flags.help:
        print(USAGE + "\n".join(_keys()))
        return DONE
    _require_single(flags.multirun, flags.cfg)
    if not flags.dry_run:
        slurm.require_slurm()
    overrides = program.last_of_each(command_line.searched(flags))
    examined, missing = program.checked(overrides, flags.config_name, submits=True)
    run_log.announce(examined.recipe.name)
    with slurm.as_in_the_job(examined.recipe):
        build.require([examined], missing)
    if flags.dry_run:
        print(slurm.text(examined.recipe, Path("RUN_DIR"), str(Path.cwd())), end="")
        return DONE
    done = slurm.submit(examined)
    if done is not None:
        print(f"job:    {done.job_id}")
        print(f"run:    {done.run_dir}")
        print(f"follow: tail -F {done.log}")
        print(f"stop:   scancel {done.job_id}")
    return DONE


def _require_single(multirun: bool, cfg: str | None) -> None:
    if multirun:
        rule = "a sweep is submitted by its launcher, as an array of jobs"
        raise ConfigError.of("runner submit --multirun", rule, f"Write {SWEEP}")
    if cfg:
        rule = "it submits a run"
        raise ConfigError.of(f"runner submit --cfg {cfg}", rule, f"Write runner --cfg {cfg}.")


def _keys() -> list[str]:
    """Return a line or more for each key of the node `submit`."""
    from runner.cli import help
    from runner.recipe.machines import Submit

    return ["Keys", *help.entries("submit", Submit)]
