"""Which run `resume` means, and whether anything is left to do in it. Free of torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe import serialization
from runner.recipe.schema import Recipe
from runner.runs import directory, lock, sessions
from runner.runs.job import Job
from runner.runs.json_files import WEIGHTS_ONLY

logger = logging.getLogger(__name__)

AUTO = "auto"
# How many of the runs that `resume=auto` skips are named, and differences of each.
MOST_NAMED, MOST_KEYS = 5, 3


def newest(wanted: Recipe) -> Path | None:
    """Return the newest run that `resume=auto` resumes; None: it starts a new one.

    It is the newest run of that name whose recipe is the same but for `resume.SAME_RUN` and which
    has a complete checkpoint, is finished, or has the directory that was chosen. The skipped runs
    are named, with the reason.

    Raises:
        ConfigError: if another command trains in that run, the recipe of a run is damaged, or the
            chosen directory holds another run or anything else.
    """
    passed: list[str] = []
    found = None
    for run_dir in _candidates(wanted):
        reason = _reason_to_skip(run_dir, wanted)
        if reason is None:
            found = run_dir
            break
        passed.append(f"{run_dir}: {reason}")
    if passed and found is None and wanted.run_dir is not None:
        rule = f"the directory holds another run: {passed[0].partition(': ')[2]}"
        remedy = "Undo the change, or name another directory."
        raise directory.UsedError.of(f"run_dir={wanted.run_dir!r} resume=auto", rule, remedy)
    for line in passed[:MOST_NAMED]:
        logger.warning("resume=auto skips %s.", line)
    if passed and found is None:
        logger.warning("resume=auto finds no run to resume: it starts a new one.")
    return found


def _candidates(wanted: Recipe) -> list[Path]:
    """Return the runs that `resume=auto` may mean, newest first."""
    if wanted.run_dir is not None:
        chosen = Path(wanted.run_dir).expanduser().absolute()
        if directory.is_run(chosen):
            return [chosen]
        directory.require_unused(chosen)
        return []
    return directory.claimed(wanted.output_dir, wanted.name)[::-1]


def _reason_to_skip(run_dir: Path, wanted: Recipe) -> str | None:
    if not directory.is_run(run_dir):
        return "it was killed before its recipe was written"
    different = _differences(run_dir, wanted, serialization.SAME_RUN)
    if different:
        more = f" and {len(different) - MOST_KEYS} more" if len(different) > MOST_KEYS else ""
        keys = [f"{key} is {there} there, {here} here" for key, there, here in different]
        return f"its recipe is another ({'; '.join(keys[:MOST_KEYS])}{more})"
    other = lock.holder(run_dir)
    if other is not None:
        rule = f"another command trains in {run_dir} ({other})"
        raise ConfigError.of("resume=auto", rule, "Wait for its end, or stop it first.")
    if wanted.run_dir is not None:
        return None  # without a complete checkpoint it begins anew there
    if is_finished(run_dir, wanted) is None and directory.newest_checkpoint(run_dir) is None:
        return "it has no complete checkpoint"
    return None


def is_finished(run_dir: Path, wanted: Recipe) -> str | None:
    """Return why nothing is left to do in a run; None if something is."""
    summary = sessions.summary(run_dir)
    if summary.get("complete") is not True:
        return None  # the work after the last step is not done, either
    trainer, step, epoch = wanted.trainer, summary.get("step"), summary.get("epochs_completed")
    at = f"step {step}"
    for limit, wanted_by, reached in (
        (f"trainer.max_steps={trainer.max_steps} reached", trainer.max_steps, step),
        (f"trainer.epochs={trainer.epochs} completed", trainer.epochs, epoch),
    ):
        if wanted_by is not None and isinstance(reached, int) and reached >= wanted_by:
            past = f" and passed: the run is at {at}, epoch {epoch}"
            return f"{limit} at {at}" if reached == wanted_by else limit + past
    ended_by_itself = summary.get("stopped") in ("callback", "pruned")
    if ended_by_itself and not _differences(run_dir, wanted, serialization.NO_CHANGE):
        return f"{summary.get('reason')} (step {step})"
    return None


def require_same(run_dir: Path, wanted: Recipe) -> None:
    """Raise a ConfigError with the differences if a run has another recipe than `wanted`."""
    different = _differences(run_dir, wanted, (("resume",), ("run_dir",)))
    ConfigError.raise_if(
        [
            Problem(
                f"{key}={here}",
                f"the run in {run_dir} has {key}={there}",
                "Undo the change, or train in another directory.",
            )
            for key, there, here in different
        ]
    )


def require_effect(run_dir: Path, wanted: Recipe, reason: str, auto: bool = False) -> None:
    """Refuse overrides of a finished run that have no effect any more.

    `reason` tells why nothing is left to do. Where `auto`, `resume=auto` has found the run: keys of
    `serialization.SAME_RUN` may differ.

    Raises:
        ConfigError: naming every such key except limits, which `is_finished` has checked.
    """
    idle = serialization.SAME_RUN if auto else (*serialization.LIMITS, ("distributed",))
    ConfigError.raise_if(
        [
            Problem(
                f"{key}={here} with resume={str(run_dir)!r}",
                f"the run is finished ({reason}), so it changes nothing any more ({key}={there})",
                f"Leave {key} out, raise trainer.epochs or max_steps, or start a new run.",
            )
            for key, there, here in _differences(run_dir, wanted, idle)
        ]
    )


def require_reach(run_dir: Path, checkpoint: Path, wanted: Recipe) -> None:
    """Refuse limits that are passed already by the checkpoint: training is never undone."""
    found = checkpoints.read_manifest(checkpoint).metadata
    step, epoch = found.get("step"), found.get("epoch")
    trainer, problems = wanted.trainer, Problems()
    if found.get(WEIGHTS_ONLY):
        rule = "checkpoint.weights_only has left its newest complete checkpoint only the weights"
        remedy = f"Start a new run from them: init_from={str(run_dir)!r}."
        problems.add(f"resume={str(run_dir)!r}", rule, remedy)
    within = bool(found.get("samples_in_epoch"))
    for key, limit, reached, beyond in (
        ("max_steps", trainer.max_steps, step, False),
        ("epochs", trainer.epochs, epoch, within),
    ):
        if limit is not None and isinstance(reached, int) and reached + beyond > limit:
            rule = f"the run is at step {step}, epoch {epoch} completed: it continues from there"
            remedy = f"Give trainer.{key} at least {reached + beyond}, or leave it out."
            value = f"trainer.{key}={limit} with resume={str(run_dir)!r}"
            problems.add(value, rule, remedy)
    problems.raise_if()


def _differences(
    run_dir: Path, wanted: Recipe, but_for: Sequence[tuple[str, ...]]
) -> list[tuple[str, object, object]]:
    job, plain = Job.read(run_dir)
    here = serialization.same_places(plain, job.cwd, serialization.frozen_plain(wanted))
    return serialization.differences(plain, here, but_for)
