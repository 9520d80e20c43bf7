"""One attempt at one job of a sweep, in the process that trains it or starts its workers.

The job's run directory is locked from before the journal says "started" until after it says
"ended", so that no two commands train a job at once. Whatever is killed, the next attempt finds out
from the journal and the run directory what is left to do. Free of torch until the job is trained.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.machine.errors import ConfigError
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures, start_run
from runner.runs import lock, resumable, sessions, study
from runner.runs.study import StudyFile
from runner.runs.sweep_records import FINISHED, PRUNED
from runner.sweep.journal import FAILED as FAILURE
from runner.sweep.journal import Journal
from runner.training import state as training

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe

# Of a process in which another command's lock kept the job from being started.
BUSY = 76
# Limits that end a run before its schedule: it has come as far as its recipe says.
EARLY_LIMITS = ("max_time", "stop_after")


def run(
    folder: Path,
    number: int,
    overrides: Sequence[str],
    config_name: str,
    recipe: Recipe,
    *,
    fresh: bool = False,
    log_levels: Mapping[str, str] | None = None,
) -> int:
    """Train a job of the sweep in `folder` to its end, and record that in the journal.

    With `fresh` it gets processes of its own in any case. `log_levels` are those of loggers by
    name. An error is printed.

    Returns:
        The exit code of the job; 0 also where it was finished already. `BUSY`: another command
        trains it.
    """
    run_dir = folder / f"{number:04}"

    def train() -> int:
        return _train(run_dir, overrides, config_name, recipe, fresh=fresh, log_levels=log_levels)

    try:
        run_dir.mkdir(exist_ok=True)
        with lock.held(run_dir):
            return _locked(folder, number, overrides, recipe, train)
    except lock.HeldError:
        return BUSY
    except Exception as error:
        return failures.report(error)


def _locked(
    folder: Path,
    number: int,
    overrides: Sequence[str],
    recipe: Recipe,
    train: Callable[[], int],
) -> int:
    journal, run_dir = Journal(folder), folder / f"{number:04}"
    before = journal.state(number)
    if before.is_complete:
        return DONE
    summary = sessions.summary(run_dir)
    if is_finished(summary) and _is_of(run_dir, recipe):  # killed before it could say so
        journal.ended(number, before.attempt, overrides, DONE, **_values(summary, run_dir))
        return DONE
    attempt = journal.started(number, overrides)
    code = train()
    values = _values(sessions.summary(run_dir), run_dir) if code == DONE else {}
    journal.ended(number, attempt, overrides, code, **values)
    return code


def _is_of(run_dir: Path, recipe: Recipe) -> bool:
    """Return whether a directory holds a run of a recipe, and of no other.

    Another is refused with its difference by what goes on with the run.
    """
    also = [("trainer", name) for name in EARLY_LIMITS]
    try:
        one = not sessions.earlier_recipes(run_dir)
        return one and not resumable.is_changed(run_dir, recipe, also)
    except ConfigError:
        return False


def _train(
    run_dir: Path,
    overrides: Sequence[str],
    config_name: str,
    recipe: Recipe,
    *,
    fresh: bool,
    log_levels: Mapping[str, str] | None,
) -> int:
    try:
        return start_run.continue_in(
            run_dir, recipe, overrides, config_name, fresh=fresh, log_levels=log_levels
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return STOPPED if end.code == STOPPED else FAILED  # not even 0: it is not complete
    except Exception as error:
        return failures.report(error)


def record_refusal(folder: Path, number: int, overrides: Sequence[str], code: int) -> None:
    """Record that values which a sweeper has chosen are no valid recipe."""
    journal = Journal(folder)
    journal.ended(number, journal.started(number, overrides), overrides, code)


def recorded_death(
    folder: Path,
    number: int,
    overrides: Sequence[str],
    code: int,
    reason: str | None = None,
    ordered: float | None = None,
) -> None:
    """Record the end of a job whose process died without a word, unless it is trained again.

    Args:
        folder: of the sweep.
        number: of the job.
        overrides: of the job.
        code: its exit code.
        reason: how it died; None: that is not known.
        ordered: when its process was ordered, seconds since the epoch: one that died before it had
            recorded its start has failed, too; None: that is not known.
    """
    run_dir, journal = folder / f"{number:04}", Journal(folder)
    try:
        run_dir.mkdir(exist_ok=True)
        with lock.held(run_dir):
            state = journal.state(number)
            if state.is_complete:
                return
            begun = "" if state.ended else state.attempt
            if not begun:
                if ordered is None or float(str(state.ended.get("time", 0.0))) >= ordered:
                    return
                begun = journal.started(number, overrides)
            summary = sessions.summary(run_dir)
            done = is_finished(summary)
            values = _values(summary, run_dir) if done else {"reason": reason} if reason else {}
            journal.ended(number, begun, overrides, DONE if done else code, **values)
    except lock.HeldError:  # it is trained again
        return
    except (ConfigError, OSError) as error:  # the next command finds out from the run directory
        print(f"job {number:04}: its end could not be recorded: {error}", file=sys.stderr)


def is_finished(summary: Mapping[str, Any]) -> bool:
    """Return whether a run has come to an end of its own."""
    return summary.get("complete") is True or summary.get("stopped") in EARLY_LIMITS


def objective(summary: Mapping[str, Any]) -> float | None:
    """Return the best value of a run's monitored validation metric, else its last; None: none."""
    if summary.get("best") is not None:
        return float(summary["best"]["value"])
    validation = summary.get("metrics", {}).get("validation", {})
    value = validation.get(summary.get("monitor"))
    return None if value is None else float(value)


def _values(summary: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return what the journal records of a finished run, for the table."""
    best = summary.get("best") or {}
    found = {
        "status": PRUNED if summary.get("stopped") == training.PRUNED else FINISHED,
        "objective": objective(summary),
        "objective_step": best.get("step", summary.get("step")),
        "metric": summary.get("monitor"),
        "mode": summary.get("mode"),
        "step": summary.get("step"),
        "best_step": best.get("step"),
        "seconds": summary.get("seconds"),
    }
    searched = study.of_sweep(run_dir.parent)
    return found if searched is None else found | _searched(summary, searched, run_dir)


def _searched(summary: Mapping[str, Any], searched: StudyFile, run_dir: Path) -> dict[str, object]:
    """Return the objectives of a search, where they are others than the monitored metric.

    A run without them has failed for the search, though it has come to its end.
    """
    metrics = list(searched.metrics)
    pruned = summary.get("stopped") == training.PRUNED
    if metrics == [study.BEST]:
        return {} if pruned else _judged([objective(summary)])
    named: dict[str, object] = {"metric": None, "mode": None}
    if len(metrics) == 1:
        named = {"metric": metrics[0], "mode": searched.modes[0]}
    try:
        values = study.values_of(summary, metrics, run_dir)
    except ConfigError as error:
        lacking = {} if pruned else {"status": FAILURE, "reason": str(error)}
        return named | lacking | {"objective": None}
    judged = {} if pruned else _judged(values)
    found: object = values if len(values) > 1 else values[0]
    step = study.step_of(summary, metrics)
    return named | judged | {"objective": found, "objective_step": step, "best_step": step}


def _judged(values: Sequence[float | None]) -> dict[str, object]:
    """Return what a search makes of a run's objectives; empty: they are numbers."""
    if None in values:
        return {"status": FAILURE, "reason": "an objective is not measured"}
    if not all(value is not None and math.isfinite(value) for value in values):
        return {"status": FAILURE, "reason": "an objective is no finite number"}
    return {}
