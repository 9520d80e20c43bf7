"""Which rank hangs, judged from reports of all ranks. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.launch.stacks import BUSY, IN_TORCH, WAITING, Stack
from runner.recipe.durations import parse_duration
from runner.training.heartbeat import START_UP

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe

# A start-up in which nothing changes for that many time limits is ended.
START_UP_LIMITS = 6


def timeout_of(recipe: Recipe) -> float | None:
    """Return the seconds without progress after which a worker counts as hanging; None: never."""
    return parse_duration(recipe.trainer.hang_timeout, "trainer.hang_timeout")


@dataclass(frozen=True)
class Report:
    """The state of one rank: that of its `Progress`, and the stack of its main thread.

    `seconds` have passed since the count last changed. `collectives` is how many the default
    process group has started; None: not known. `ending` tells why training has ended on the rank,
    and when; empty: it has not.
    """

    rank: int
    count: int
    phase: str
    is_slow: bool
    seconds: float
    collectives: int | None
    stack: Stack
    ending: str = ""

    @property
    def state(self) -> tuple[int, int | None, Stack]:
        """Fields that are the same for as long as the rank makes no progress at all."""
        return self.count, self.collectives, self.stack

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Report:
        """Return the report that `plain` describes."""
        return cls(**{**plain, "stack": Stack.from_plain(plain["stack"])})


@dataclass(frozen=True)
class Verdict:
    """The rank that hangs, for which the others wait, and whether the run is ended.

    `message` has its activity and position, and where the others wait; `stack` is its Python stack,
    empty where it does not answer. `is_new` is false where the reports before had the same verdict.
    """

    rank: int
    message: str
    stack: str
    ends: bool
    is_new: bool


def judge(
    reports: Mapping[int, Report],
    silent: Mapping[int, str],
    limit: float,
    before: Sequence[Mapping[int, Report]] = (),
    dead: Set[int] = frozenset(),
) -> Verdict | None:
    """Return which rank hangs; None: the run makes progress, or is in a debugger.

    A run is ended in the middle of training, where each step takes a time that is known. Start-up
    with the first step, compilation, evaluation and saving take as long as they take: the rank is
    named, and the run is ended only if every rank waits for another, twice in the same place, if a
    process is stopped or gone, or if nothing changes in start-up for `START_UP_LIMITS` limits.

    Args:
        reports: of the ranks that have answered.
        silent: why the other ranks have not.
        limit: seconds without progress.
        before: the previous reports, newest first.
        dead: the silent ranks whose process is stopped or gone.
    """
    if any(report.seconds < limit / 2 or report.stack.is_debugged for report in reports.values()):
        return None
    kinds = {report.stack.kind for report in reports.values()}
    deadlocked = not silent and kinds == {WAITING} and len(reports) > 1
    same = list(takewhile(lambda earlier: _same(reports, earlier, limit), before))
    unchanged = bool(same)
    stuck = unchanged and all(
        report.phase == START_UP
        and report.seconds - same[-1][rank].seconds >= (START_UP_LIMITS - 1) * limit
        for rank, report in reports.items()
    )
    slow = any(report.is_slow or report.stack.compiles for report in reports.values())
    out_of_step = None if silent else _rank_out_of_step(reports)
    first = out_of_step
    if first is None:
        first = min(dead) if dead else _first(reports, silent, deadlocked)
    others = [reports[rank] for rank in sorted(reports) if rank != first]
    if first in silent:
        activity, stack = silent[first], ""
    else:
        report = reports[first]
        stack = report.stack.text
        activity = f"no progress for {report.seconds:.0f} s in {report.phase}, at {_where(report)}"
    waits = "; ".join(f"rank {other.rank} is at {_where(other)}" for other in others[:3])
    rest = f", and {len(others) - 3} more" if len(others) > 3 else ""
    cause = "every rank waits for another, in different places: " if deadlocked else ""
    if out_of_step is not None:
        cause, stack = _out_of_step_text(reports, out_of_step), ""  # its stack is as expected
    message = f"{cause}{activity}. Meanwhile {waits}{rest}" if others else f"{cause}{activity}"
    ends = not slow or (deadlocked and unchanged) or bool(dead) or stuck
    return Verdict(first, message, stack, ends, is_new=not unchanged)


def _same(now: Mapping[int, Report], before: Mapping[int, Report], limit: float) -> bool:
    """Return whether the same ranks were at the same place before, and had a verdict."""
    return now.keys() == before.keys() and all(
        before[rank].seconds >= limit / 2 and report.state == before[rank].state
        for rank, report in now.items()
    )


def _rank_out_of_step(reports: Mapping[int, Report]) -> int | None:
    """Return a rank that has ended training, or not ended it, unlike most; None: all agree."""
    ended = [rank for rank, report in reports.items() if report.ending]
    going = [rank for rank, report in reports.items() if not report.ending]
    if not ended or not going:
        return None
    return min(ended if len(ended) <= len(going) else going)


def _out_of_step_text(reports: Mapping[int, Report], rank: int) -> str:
    ending = next(report.ending for report in reports.values() if report.ending)
    behaviour = "ended training" if reports[rank].ending else "did not end training with the others"
    return f"it {behaviour} {ending}; call loop.stop on every rank at the same step: "


def _first(reports: Mapping[int, Report], silent: Mapping[int, str], deadlocked: bool) -> int:
    if silent:
        return min(silent)
    if deadlocked:
        places = Counter(str(report.stack.own) for report in reports.values())
        return min(reports, key=lambda rank: (places[str(reports[rank].stack.own)], rank))
    order = {BUSY: 0, IN_TORCH: 1, WAITING: 2}
    return min(
        reports,
        key=lambda rank: (
            order[reports[rank].stack.kind],
            reports[rank].collectives or 0,
            reports[rank].count,
            rank,
        ),
    )


def _where(report: Report) -> str:
    own, inner = report.stack.own, report.stack.places[-1]
    if own == inner:
        return str(own)
    return f"{own} ({inner.function}, {Path(inner.file).name}:{inner.line})"
