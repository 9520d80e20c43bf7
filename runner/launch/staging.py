"""The files of one attempt at a run, written beside those of its directory. Free of torch."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine.errors import ConfigError
from runner.recipe import paths
from runner.run_dir import atomic_update, directory, environment, resumable
from runner.run_dir.job import JOB, Job

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe


def staged(requested: Job, recipe: Recipe) -> Job:
    """Write the job, its recipe and the environment beside those of the run directory.

    Raises:
        ConfigError: if they cannot be written.
    """
    try:
        written = requested.stage(recipe)
        try:
            environment.write_environment(written.place, recipe.data)
            resumable.mark_incomplete(requested.run_dir, written.place)
        except BaseException:
            atomic_update.discard(written.place)
            raise
    except OSError as error:
        rule = f"a run is written there, and that failed ({paths.failure(error)})"
        remedy = "Make room or give it a folder you may write to; nothing of it has changed."
        raise ConfigError.of(str(requested.run_dir), rule, remedy) from error
    return written


def again(failed: Job, recipe: Recipe) -> Job:
    """Return the job that goes on with a run after `failed`: from its newest complete checkpoint.

    Without one the run begins anew, and the files of the attempt are kept in
    ``logs/attempt_<n>/``. Requires the run's lock.

    Raises:
        ConfigError: if its files cannot be written.
    """
    if failed.folder is not None and failed.folder.is_dir():
        return failed  # it has changed nothing of the run
    run_dir, requested = failed.run_dir, replace(failed, folder=None, resume_from=None)
    atomic_update.recover(run_dir)
    checkpoint = directory.newest_checkpoint(run_dir)
    if checkpoint is not None:
        return staged(replace(requested, resume_from=str(checkpoint)), recipe)
    directory.set_aside(run_dir)
    atomic_update.commit(staged(requested, recipe).place)
    return requested


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
