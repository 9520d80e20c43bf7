"""One attempt at a job of a sweep, in the process that trains it or starts its workers.

A job's state is that of its run. The run's lock decides who trains it, so that no two commands
train a job at once. Free of torch until the job is trained.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures, start_run
from runner.runs import lock, resumable, sessions
from runner.runs.outcomes import Outcome
from runner.sweep.sweep import job_dir

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe

# Of a process in which another command's lock kept the job from being started.
BUSY = 76


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
    """Train a job of the sweep in `folder` to its end.

    With `fresh` it gets processes of its own in any case. `log_levels` are those of loggers by
    name. An error is printed.

    Returns:
        The exit code of the job; 0 also where it was finished already. `BUSY`: another command
        trains it.
    """
    run_dir = job_dir(folder, number)

    def train() -> int:
        run_dir.mkdir(exist_ok=True)
        with lock.held(run_dir):
            if sessions.is_done(run_dir):
                resumable.require_same(run_dir, recipe)
                return DONE
            return start_run.continue_in(
                run_dir, recipe, overrides, config_name, fresh=fresh, log_levels=log_levels
            )

    try:
        return code_of(train)
    except lock.HeldError:
        return BUSY


def code_of(train: Callable[[], int]) -> int:
    """Return the exit code of what trains a job; the error that it ends with is printed.

    Raises:
        HeldError: if another command trains it.
    """
    try:
        return train()
    except lock.HeldError:
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return STOPPED if end.code == STOPPED else FAILED  # not even 0: it is not complete
    except Exception as error:
        return failures.report(error)


def record_death(folder: Path, number: int, code: int, how: str) -> int:
    """Record the end of a job whose process died without a word, unless it is trained again.

    Returns:
        The exit code of the job, which may have come to its end before its process died.
    """
    run_dir = job_dir(folder, number)
    if sessions.is_done(run_dir):
        return DONE
    for session in sessions.of_run(run_dir)[-1:]:
        with contextlib.suppress(lock.HeldError), lock.held(run_dir):
            sessions.end(session, code, cause=asdict(Outcome(0, time.time(), code, how)))
    return code
