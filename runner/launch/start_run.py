"""From a checked recipe to a run: directory claimed, job launched. Free of torch at import."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine.errors import AccelError, ConfigError
from runner.exit_codes import DONE, REFUSED
from runner.launch import launcher, staging
from runner.recipe import processes, resumed_recipe, trust
from runner.runs import directory, lock, reproduction, resumable, sessions
from runner.runs.job import Job
from runner.runs.resumable import AUTO
from runner.training import run_log

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe

OnClaimed = Callable[[Path], object]


def start(
    recipe: Recipe,
    overrides: Sequence[str],
    config_name: str,
    *,
    fresh: bool = False,
    origin: str | None = None,
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
        frozen = replace(recipe, resume=None, run_dir=None)
        frozen = _placed(frozen, Job.read(run_dir)[0].cwd)
        return _resume(requested, frozen, origin, fresh, auto, on_claimed)
    run_dir, is_claimed = _claimed(recipe)
    try:
        with lock.held(run_dir):
            if not is_claimed:
                directory.require_unused(run_dir)  # another command may have taken it meanwhile
            on_claimed(run_dir)
            requested = _job(run_dir, overrides, config_name, log_levels)
            code = _train_new(requested, recipe, fresh)
    except (directory.UsedError, lock.HeldError):
        raise
    except (AccelError, OSError):
        directory.remove_unstarted(run_dir, REFUSED, with_parents=is_claimed)
        raise
    directory.remove_unstarted(run_dir, code, with_parents=is_claimed)
    return code


def _claimed(recipe: Recipe) -> tuple[Path, bool]:
    """Return a directory for a new run, and whether it is one of its own, not a person's choice."""
    if recipe.run_dir is None:
        return directory.claim(recipe.output_dir, recipe.name), True
    return directory.claim_chosen(recipe.run_dir), False


def freeze(
    recipe: Recipe,
    overrides: Sequence[str],
    config_name: str,
    *,
    origin: str | None = None,
    auto: bool = False,
    on_frozen: Callable[[Path, Recipe], object],
    log_levels: Mapping[str, str] | None = None,
) -> None:
    """Freeze a job as `start` does, start nothing, and call `on_frozen` under the run's lock.

    `on_frozen` gets the session and the frozen recipe; whoever trains there later calls
    `continue_in`. Where it fails, the session is removed, and with it the directory of a new run.

    Raises:
        ConfigError: as `start` does.
    """
    if recipe.resume is not None:
        run_dir = Path(recipe.resume)
        origin = directory.fingerprint(run_dir) if origin is None else origin
        frozen = _placed(replace(recipe, resume=None, run_dir=None), Job.read(run_dir)[0].cwd)
        reason = resumable.is_finished(run_dir, frozen)
        if reason is not None:
            resumable.require_effect(run_dir, frozen, reason, auto)
            raise ConfigError.of(str(run_dir), f"the run is finished: {reason}", "Start a new run.")
        with _locked_for_resume(run_dir, origin):
            checkpoint = directory.newest_checkpoint(run_dir)
            if checkpoint is not None:
                resumable.require_reach(run_dir, checkpoint, frozen)
            staged = staging.staged(_job(run_dir, overrides, config_name, log_levels), frozen)
            try:
                on_frozen(staged.place, frozen)
            except BaseException:
                sessions.discard(staged.place)
                raise
        return
    run_dir, is_claimed = _claimed(recipe)
    try:
        with lock.held(run_dir):
            if not is_claimed:
                directory.require_unused(run_dir)
            requested = _job(run_dir, overrides, config_name, log_levels)
            frozen = _placed(replace(recipe, resume=None, run_dir=None), requested.cwd)
            on_frozen(staging.staged(requested, frozen).place, frozen)
    except (directory.UsedError, lock.HeldError):
        raise
    except BaseException:
        directory.remove_unstarted(run_dir, REFUSED, with_parents=is_claimed)
        raise


@contextlib.contextmanager
def _locked_for_resume(run_dir: Path, origin: str) -> Iterator[None]:
    with lock.held(run_dir):
        if directory.fingerprint(run_dir) != origin:
            rule = "another command has changed the run meanwhile"
            raise ConfigError.of(str(run_dir), rule, "Give the command again.")
        directory.remove_partials(run_dir)
        yield


def continue_in(
    run_dir: Path,
    recipe: Recipe,
    overrides: Sequence[str],
    config_name: str,
    *,
    fresh: bool = False,
    log_levels: Mapping[str, str] | None = None,
    may_change: bool = False,
) -> int:
    """Train the run of a directory to its end, whatever an earlier command has left there.

    It is resumed from its newest complete checkpoint; without one it begins anew. Requires the
    run's lock, which this process holds.

    Raises:
        ConfigError: if a run of another recipe was trained there, unless it `may_change`.
    """
    processes.count(recipe.distributed)
    directory.remove_partials(run_dir)
    requested = _job(run_dir, overrides, config_name, log_levels)
    if sessions.begun(run_dir):
        if not may_change:
            resumable.require_same(run_dir, recipe)
        if (reason := resumable.is_finished(run_dir, recipe)) is not None:
            launcher.release_followers()
            print(f"{run_dir} is finished: {reason}. Nothing is left to do.", flush=True)
            return DONE
        if directory.newest_checkpoint(run_dir) is not None:
            frozen = replace(recipe, resume=None, run_dir=None)
            return _train_on(requested, _placed(frozen, Job.read(run_dir)[0].cwd), fresh)
    directory.set_aside(run_dir)
    return _train_new(requested, recipe, fresh)


def _train_new(requested: Job, recipe: Recipe, fresh: bool) -> int:
    """Freeze a new run in its directory and train it."""
    frozen = _placed(replace(recipe, resume=None, run_dir=None), requested.cwd)
    return launcher.launch(staging.staged(requested, frozen), frozen, fresh=fresh)


def as_frozen(recipe: Recipe) -> Recipe:
    """Return a recipe as the first of several nodes freezes it."""
    cwd = os.getcwd() if recipe.resume in (None, AUTO) else Job.read(recipe.resume)[0].cwd
    return _placed(replace(recipe, resume=None, run_dir=None), cwd)


def _placed(recipe: Recipe, cwd: str) -> Recipe:
    """Return a recipe with absolute folders of states and logs: it may be resumed from anywhere."""
    project = replace(recipe.checkpoint.project)
    project.project_dir = resumed_recipe.absolute(project.project_dir, cwd)
    project.logging_dir = resumed_recipe.absolute(project.logging_dir, cwd)
    return replace(recipe, checkpoint=replace(recipe.checkpoint, project=project))


def _resume(
    requested: Job, recipe: Recipe, origin: str, fresh: bool, auto: bool, on_claimed: OnClaimed
) -> int:
    """Resume a run. Until the first step is made, only the new session is written."""
    run_dir = requested.run_dir
    reason = resumable.is_finished(run_dir, recipe)
    if reason is not None:
        resumable.require_effect(run_dir, recipe, reason, auto)
        launcher.release_followers()
        on_claimed(run_dir)
        print(f"{run_dir} is finished: {reason}. Nothing is left to do.", flush=True)
        return DONE
    with _locked_for_resume(run_dir, origin):
        if auto and directory.newest_checkpoint(run_dir) is None:  # of the directory that is chosen
            on_claimed(run_dir)
            print(f"{run_dir}: no complete checkpoint lies there. The run begins anew.", flush=True)
            directory.set_aside(run_dir)
            return _train_new(requested, recipe, fresh)
        return _train_on(requested, recipe, fresh, on_claimed)


def _train_on(
    requested: Job,
    recipe: Recipe,
    fresh: bool,
    on_claimed: OnClaimed = lambda run_dir: None,
) -> int:
    """Resume a run from its newest checkpoint."""
    checkpoint = _checkpoint(requested.run_dir)
    resumable.require_reach(requested.run_dir, checkpoint, recipe)
    on_claimed(requested.run_dir)
    changed = reproduction.changed_since(requested.run_dir, requested.imports, recipe.data)
    with run_log.captured(requested.run_dir, "of resume") if changed else contextlib.nullcontext():
        for difference in changed:
            print(f"resume: {difference}", flush=True)
    staged = staging.staged(replace(requested, resume_from=str(checkpoint)), recipe)
    return launcher.launch(staged, recipe, fresh=fresh)


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
