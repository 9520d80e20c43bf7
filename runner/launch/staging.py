"""The session that a command, or a restart, adds to a run. Free of torch."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine.errors import ConfigError
from runner.recipe import paths
from runner.runs import directory, environment, sessions
from runner.runs.job import Job
from runner.runs.sessions import JOB

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe


def staged(requested: Job, recipe: Recipe) -> Job:
    """Write the job, its recipe and the environment to a new session of the run.

    Raises:
        ConfigError: if they cannot be written.
    """
    try:
        written = requested.save(recipe)
        try:
            environment.write_environment(written.place, recipe.data)
        except BaseException:
            sessions.discard(written.place)
            raise
    except OSError as error:
        rule = f"a run is written there, and that failed ({paths.failure(error)})"
        remedy = "Make room or give it a folder you may write to; nothing of it has changed."
        raise ConfigError.of(str(requested.run_dir), rule, remedy) from error
    return written


def again(failed: Job, recipe: Recipe) -> Job:
    """Return the job that goes on with a run after `failed`: from its newest complete checkpoint.

    Without one the run begins anew. Requires the run's lock.

    Raises:
        ConfigError: if its files cannot be written.
    """
    checkpoint = directory.newest_checkpoint(failed.run_dir)
    if checkpoint is None:
        directory.set_aside(failed.run_dir)
    origin = None if checkpoint is None else str(checkpoint)
    return staged(replace(failed, resume_from=origin, restart=True), recipe)


def restarts_used(run_dir: Path) -> int:
    """Return how many restarts a run has had, over all commands that have trained it."""
    return sum(Job.read(folder)[0].restart for folder in sessions.of_run(run_dir))


def origin(job: Job) -> str:
    """Describe where a job begins."""
    if job.resume_from is None:
        return "the beginning (there is no complete checkpoint)"
    checkpoint = Path(job.resume_from)
    inside = checkpoint.is_relative_to(job.run_dir)
    return str(checkpoint.relative_to(job.run_dir) if inside else checkpoint)


def digest(folder: Path) -> str:
    """Return the digest of the frozen job in a folder; empty: there is none."""
    path = folder / JOB
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
