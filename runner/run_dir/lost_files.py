"""Damage of a run that no file shows by itself: files that are missing or truncated. Free of torch.

What is compared is what every ended run leaves; sizes are asked for, and no large file is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from runner.run_dir import atomic_update, earlier_sessions, field_types
from runner.run_dir.atomic_update import COMMITTED
from runner.run_dir.json_files import METRICS, SUMMARY, WEIGHTS_STEP, Fields
from runner.run_dir.provenance import DIFF, ENVIRONMENT


class Run(Protocol):
    """What is read of a run; `record.RunRecord` is one."""

    @property
    def path(self) -> Path:
        """The run directory."""
        ...

    @property
    def summary(self) -> Fields:
        """The content of summary.json."""
        ...

    @property
    def environment(self) -> Fields:
        """The content of environment.json."""
        ...

    @property
    def last(self) -> Fields:
        """The newest record of metrics.jsonl."""
        ...

    def value(self, key: str) -> Any:
        """Return the value at a dotted key of the recipe."""
        ...

    def tail(self) -> list[bytes]:
        """Return the last lines of metrics.jsonl, newest first."""
        ...

    def records(self) -> Iterator[Fields]:
        """Yield the records of metrics.jsonl, oldest first."""
        ...


def find(run: Run, *, settled: bool, running: bool) -> Iterator[str]:
    """Yield what is missing or truncated of a run, a sentence each.

    Args:
        run: the run.
        settled: it has ended, and its summary.json is of its newest attempt.
        running: it is trained now, so that its files may be on the move.
    """
    yield from _of_metrics(run, settled)
    yield from _of_checkpoint(run, settled)
    if not running:
        yield from _of_environment(run)


def _of_metrics(run: Run, settled: bool) -> Iterator[str]:
    """Yield what is wrong with metrics.jsonl; a killed run may leave a torn line."""
    if settled and run.summary and _size(run.path, METRICS) is None:
        yield f"{METRICS} is missing"
        return
    lines = run.tail()
    if settled and not lines and run.summary.get("metrics") and not _size(run.path, METRICS):
        yield f"{METRICS} is empty"
        return
    whole = [_is_json(line) for line in lines]
    if settled and whole[:1] == [False]:
        yield f"{METRICS} is truncated at its end"
    if not all(whole[1:]):
        for _ in run.records():  # notes the number of each damaged line
            pass
    elif settled and lines:
        yield from _of_last_step(run)


def _is_json(line: bytes) -> bool:
    try:
        field_types.loads(line)
    except ValueError:
        return False
    return True


def _of_last_step(run: Run) -> Iterator[str]:
    """Yield that metrics.jsonl ends before the last record that such a run has written for sure."""
    last, step = run.last.get("step"), run.summary.get("step")
    if last is None or step is None or last >= step:
        return
    reached = step
    if run.summary.get(WEIGHTS_STEP) is None:  # else the test at the end has a line
        # A session that is stopped has written its log points, and one that makes no step nothing.
        every = run.value("trainer.log_every")
        recipes = _kept_recipes(run.path)
        if not isinstance(every, int) or every < 1 or recipes:  # of others, log points may differ
            return
        reached = step - step % every
    if last < reached:
        yield f"{METRICS} ends at step {last}, and {SUMMARY} at step {step}: its end is lost"


def _kept_recipes(run_dir: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return atomic_update.kept_recipes(run_dir)
    return []


def _of_checkpoint(run: Run, settled: bool) -> Iterator[str]:
    """Yield whether the checkpoint that a finished run ended with is gone."""
    recorded = run.summary.get("checkpoint")
    if not recorded or not settled:
        return
    path, run_dir = Path(recorded), run.summary.get("run_dir")
    if run_dir and path.is_relative_to(run_dir):  # it may have been moved
        path = run.path / path.relative_to(run_dir)
    if not path.is_dir():
        inside = path.is_relative_to(run.path)
        yield f"{path.relative_to(run.path) if inside else path} is missing"


def _of_environment(run: Run) -> Iterator[str]:
    """Yield which records of the code that steps were made by are lost."""
    if not run.environment and (run.summary or run.last):
        content = atomic_update.read(run.path, ENVIRONMENT)
        if content is None:
            yield f"{ENVIRONMENT} is missing"
        elif content.strip() == b"{}":  # that it cannot be parsed is noted already
            yield f"{ENVIRONMENT} records nothing"
    yield from _of_patch(run.path, run.environment, DIFF)
    for name, diff, environment in earlier_sessions.kept_with_patches(run.path):
        if not environment:
            yield f"{name} is damaged or empty: the code of an earlier session is not known"
        yield from _of_patch(run.path, environment, diff)


def _of_patch(run_dir: Path, environment: Fields, name: str) -> Iterator[str]:
    """Yield whether the uncommitted changes that an environment names are lost."""
    git: dict[str, Any] = environment.get("git") or {}
    tracked = git.get("diff_bytes") if git.get("dirty") else None
    expected = (tracked or 0) + (git.get("untracked_bytes") or 0)
    if not expected:
        return
    found = _size(run_dir, name)
    if found is None:
        yield f"{name} is missing"
    elif git.get("diff_complete", True) and found != expected:  # else it lists names only
        yield f"{name} has {found} bytes, not {expected}"


def _size(run_dir: Path, name: str) -> int | None:
    """Return the bytes of a file of a run; None: there is none."""
    for place in (run_dir / COMMITTED / name, run_dir / name):
        with contextlib.suppress(OSError):
            return place.stat().st_size
    return None
