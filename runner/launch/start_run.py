"""From a checked recipe to a run: directory claimed, job launched. Free of torch at import."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine.errors import AccelError, ConfigError
from runner.exit_codes import DONE, REFUSED
from runner.launch import launcher, nodes
from runner.recipe import serialization, trust
from runner.runs import directory, environment, lock, resumable, sessions
from runner.runs.job import Job
from runner.runs.json_files import read_json
from runner.runs.resumable import AUTO
from runner.training import run_log

if TYPE_CHECKING:
    from runner.recipe.composition import Examined
    from runner.recipe.schema import Recipe

Train = Callable[[Job, "Recipe"], int]


def start(
    examined: Examined,
    *,
    on_claimed: Callable[[Path], object] = lambda run_dir: None,
    train: Train | None = None,
) -> int:
    """Claim a run directory, or lock that of the run to resume; freeze the job there and launch it.

    A new run that is refused leaves no directory behind.

    Args:
        examined: the recipe as composed; where its `resume` is set, that run is resumed.
        on_claimed: called with the directory of a new run.
        train: gets the frozen job, under the run's lock, in place of `launcher.launch`.

    Raises:
        ConfigError: if another command trains in the run, nothing is left that an override would
            change, or there is no checkpoint.
    """
    recipe, train = examined.recipe, train or launcher.launch
    if recipe.resume is not None:
        return _resume(Path(recipe.resume), examined, train)
    is_chosen = recipe.run_dir is not None
    if recipe.run_dir is not None:
        run_dir = directory.claim_chosen(recipe.run_dir)
    else:
        run_dir = directory.claim(recipe.output_dir, recipe.name)
    try:
        with lock.held(run_dir):
            if is_chosen:
                directory.require_unused(run_dir)  # another command may have taken it meanwhile
            on_claimed(run_dir)
            code = _begin(_job(run_dir, examined), recipe, train)
    except (directory.UsedError, lock.HeldError):
        raise
    except (AccelError, OSError):
        directory.remove_unstarted(run_dir, REFUSED, with_parents=not is_chosen)
        raise
    directory.remove_unstarted(run_dir, code, with_parents=not is_chosen)
    return code


def join(recipe: Recipe) -> int:
    """Join the run of the first node as another one, and return the exit code of the command."""
    return nodes.follow(recipe, _frozen(recipe))


def continue_in(
    run_dir: Path, examined: Examined, *, fresh: bool = False, may_change: bool = False
) -> int:
    """Train the run of a directory to its end, whatever an earlier command has left there.

    It is resumed from its newest complete checkpoint; without one it begins anew. Requires the
    run's lock, which this process holds.

    Raises:
        ConfigError: if a run of another recipe was trained there, unless it `may_change`.
    """
    train, recipe = partial(launcher.launch, fresh=fresh), examined.recipe
    directory.remove_partials(run_dir)
    job = _job(run_dir, examined)
    if sessions.begun(run_dir):
        if not may_change:
            resumable.require_same(run_dir, recipe)
        if (reason := resumable.is_finished(run_dir, recipe)) is not None:
            return _nothing_left(run_dir, reason)
        if directory.newest_checkpoint(run_dir) is not None:
            return _go_on(job, _frozen(replace(recipe, resume=str(run_dir))), train)
    directory.set_aside(run_dir)
    return _begin(job, recipe, train)


def _begin(job: Job, recipe: Recipe, train: Train) -> int:
    """Freeze a run that begins, and train it."""
    frozen = _frozen(replace(recipe, resume=None))
    return train(launcher.staged(job, frozen), frozen)


def _resume(run_dir: Path, examined: Examined, train: Train) -> int:
    """Resume a run. Until the first step is made, only the new session is written."""
    origin = directory.fingerprint(run_dir) if examined.origin is None else examined.origin
    job, frozen = _job(run_dir, examined), _frozen(examined.recipe)
    if (reason := resumable.is_finished(run_dir, frozen)) is not None:
        resumable.require_effect(run_dir, frozen, reason, examined.auto)
        return _nothing_left(run_dir, reason)
    with lock.held(run_dir):
        if directory.fingerprint(run_dir) != origin:
            rule = "another command has changed the run meanwhile"
            raise ConfigError.of(str(run_dir), rule, "Give the command again.")
        directory.remove_partials(run_dir)
        # A job of Slurm's may have been cancelled before it had made a step.
        begins = examined.auto or sessions.submitted_job(run_dir) is not None
        if begins and directory.newest_checkpoint(run_dir) is None:
            print(f"{run_dir}: no complete checkpoint lies there. The run begins anew.", flush=True)
            directory.set_aside(run_dir)
            return _begin(job, examined.recipe, train)
        return _go_on(job, frozen, train)


def _go_on(job: Job, frozen: Recipe, train: Train) -> int:
    """Resume a run from its newest checkpoint."""
    run_dir = job.run_dir
    checkpoint = directory.newest_checkpoint(run_dir)
    if checkpoint is None:
        rule = f"no complete checkpoint lies in {directory.checkpoint_folder(run_dir)}"
        remedy = f"Begin it anew with resume=auto run_dir={run_dir}, or name another directory."
        raise ConfigError.of(f"resume={str(run_dir)!r}", rule, remedy)
    resumable.require_reach(run_dir, checkpoint, frozen)
    then = environment.recorded(run_dir)
    staged = launcher.staged(replace(job, resume_from=str(checkpoint)), frozen)
    found = environment.differences(then, read_json(staged.place / environment.FILE))
    changed = [line for lines in found.values() for line in lines]
    with run_log.captured(run_dir, "of resume") if changed else contextlib.nullcontext():
        for difference in changed:
            print(f"resume: {difference}", flush=True)
    return train(staged, frozen)


def _nothing_left(run_dir: Path, reason: str) -> int:
    launcher.release_followers()
    print(f"{run_dir} is finished: {reason}. Nothing is left to do.", flush=True)
    return DONE


def _frozen(recipe: Recipe) -> Recipe:
    """Return a recipe as it is frozen, with absolute folders: it may be resumed from anywhere."""
    cwd = os.getcwd() if recipe.resume in (None, AUTO) else Job.read(recipe.resume)[0].cwd
    project = replace(recipe.checkpoint.project)
    project.project_dir = serialization.absolute(project.project_dir, cwd)
    project.logging_dir = serialization.absolute(project.logging_dir, cwd)
    checkpoint = replace(recipe.checkpoint, project=project)
    return replace(recipe, checkpoint=checkpoint, resume=None, run_dir=None)


def _job(run_dir: Path, examined: Examined) -> Job:
    return Job(
        run_dir=run_dir,
        overrides=tuple(examined.overrides),
        imports=tuple(trust.trusted()),
        cwd=os.getcwd(),
        config_name=examined.config_name,
        log_levels=dict(examined.log_levels),
    )
