"""From a checked recipe to a run: directory claimed, job launched. Free of torch at import."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.errors import AccelError, ConfigError
from runner.config import paths, processes, resumed_recipe, trust
from runner.exit_codes import DONE, REFUSED
from runner.launch import launcher
from runner.run_dir import abandoned, atomic_update, directory, environment, job, lock, resumable
from runner.run_dir.job import Job

if TYPE_CHECKING:
    from runner.config.schema import Recipe

OnClaimed = Callable[[Path], object]


def start(
    recipe: Recipe,
    overrides: Sequence[str],
    config_name: str,
    *,
    fresh: bool = False,
    origin: bytes | None = None,
    auto: bool = False,
    on_claimed: OnClaimed = lambda run_dir: None,
    log_levels: Mapping[str, str] | None = None,
) -> int:
    """Claim a run directory, or lock that of the run to resume; freeze the job there and launch it.

    A new run that is refused, or fails before its first step is made, leaves no directory behind.
    Where `resume` of the recipe is set, that run is resumed; `origin` is its
    `directory.fingerprint` when the recipe was composed (None: the present one), and `auto` tells
    whether `resume=auto` has found it. With `fresh` the job gets processes of its own in any case.
    `log_levels` are those of loggers by name, in each process of the job.

    Raises:
        ConfigError: if the number of processes contradicts the machine, another command trains in
            the run, nothing is left that an override would change, or there is no checkpoint.
    """
    processes.count(recipe.distributed)  # refused before anything is claimed
    if recipe.resume is not None:
        run_dir = Path(recipe.resume)
        origin = directory.fingerprint(run_dir) if origin is None else origin
        requested = _job(run_dir, overrides, config_name, log_levels)
        frozen = _placed(replace(recipe, resume=None), Job.read(run_dir)[0].cwd)
        return _resume(requested, frozen, origin, fresh, auto, on_claimed)
    run_dir = directory.claim(recipe.output_dir, recipe.name)
    requested = _job(run_dir, overrides, config_name, log_levels)
    return _start_new(requested, recipe, fresh, on_claimed)


def _start_new(requested: Job, recipe: Recipe, fresh: bool, on_claimed: OnClaimed) -> int:
    """Train a new run in its claimed directory; remove that if nothing worth keeping is left."""
    run_dir = requested.run_dir
    try:
        with lock.held(run_dir):
            on_claimed(run_dir)
            frozen = _placed(replace(recipe, resume=None), requested.cwd)
            atomic_update.commit(_staged(requested, frozen).place)
            code = launcher.launch(requested, frozen, fresh=fresh)
    except (AccelError, OSError):
        abandoned.remove(run_dir, REFUSED)
        raise
    abandoned.remove(run_dir, code)
    return code


def _placed(recipe: Recipe, cwd: str) -> Recipe:
    """Return a recipe with absolute folders of states and logs: it may be resumed from anywhere."""
    project = replace(recipe.checkpoint.project)
    project.project_dir = resumed_recipe.absolute(project.project_dir, cwd)
    project.logging_dir = resumed_recipe.absolute(project.logging_dir, cwd)
    return replace(recipe, checkpoint=replace(recipe.checkpoint, project=project))


def _resume(
    requested: Job, recipe: Recipe, origin: bytes, fresh: bool, auto: bool, on_claimed: OnClaimed
) -> int:
    """Resume a run. Its files are unchanged until its workers commit the new job."""
    run_dir = requested.run_dir
    reason = resumable.is_finished(run_dir, recipe)
    if reason is not None:
        resumable.require_effect(run_dir, recipe, reason, auto)
        launcher.release_followers()
        on_claimed(run_dir)
        print(f"{run_dir} is finished: {reason}. Nothing is left to do.", flush=True)
        return DONE
    with lock.held(run_dir):
        if directory.fingerprint(run_dir) != origin:
            rule = "another command has changed the run meanwhile"
            raise ConfigError.of(str(run_dir), rule, "Give the command again.")
        atomic_update.recover(run_dir)
        job.mend(run_dir)
        checkpoint = _checkpoint(run_dir)
        resumable.require_reach(run_dir, checkpoint, recipe)
        on_claimed(run_dir)
        staged = _staged(replace(requested, resume_from=str(checkpoint)), recipe)
        try:
            return launcher.launch(staged, recipe, fresh=fresh)
        finally:
            atomic_update.discard(staged.place)


def _checkpoint(run_dir: Path) -> Path:
    found = directory.newest_checkpoint(run_dir)
    if found is None:
        rule = f"no complete checkpoint lies in {directory.checkpoint_folder(run_dir)}"
        remedy = "Start a new run, or name another run directory."
        raise ConfigError.of(f"resume={str(run_dir)!r}", rule, remedy)
    return found


def _job(
    run_dir: Path, overrides: Sequence[str], config_name: str, levels: Mapping[str, str] | None
) -> Job:
    return Job(
        run_dir=run_dir,
        overrides=tuple(overrides),
        imports=tuple(trust.trusted()),
        cwd=os.getcwd(),
        config_name=config_name,
        log_levels=dict(levels or {}),
    )


def _staged(requested: Job, recipe: Recipe) -> Job:
    """Write the job, its recipe and the environment beside those of the run directory."""
    try:
        staged = requested.stage(recipe)
        try:
            environment.write_environment(staged.place, recipe.data)
            resumable.mark_incomplete(requested.run_dir, staged.place)
        except BaseException:
            atomic_update.discard(staged.place)
            raise
    except OSError as error:
        rule = f"a run is written there, and that failed ({paths.failure(error)})"
        remedy = "Make room or give it a folder you may write to; nothing of it has changed."
        raise ConfigError.of(str(requested.run_dir), rule, remedy) from error
    return staged
