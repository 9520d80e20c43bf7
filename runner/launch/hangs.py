"""Which rank hangs: a judgement on what the ranks report of themselves. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.launch.stacks import BUSY, IN_TORCH, WAITING, Stack


@dataclass(frozen=True)
class Report:
    """What one rank says of itself.

    Attributes:
        rank: the rank.
        count: `Progress.count`.
        phase: `Progress.phase`.
        is_slow: whether the phase takes as long as it takes.
        seconds: since the count last changed.
        collectives: how many the default process group has started; None: not known.
        stack: of the main thread.
        ending: why training has ended on the rank, and when; empty: it goes on.
    """

    rank: int
    count: int
    phase: str
    is_slow: bool
    seconds: float
    collectives: int | None
    stack: Stack
    ending: str = ""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Report:
        """Return what `plain` was made of."""
        return cls(**{**plain, "stack": Stack.from_plain(plain["stack"])})

    def plain(self) -> dict[str, Any]:
        """Return this as plain containers."""
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """What hangs, and whether that ends the run.

    Attributes:
        rank: the rank that the others wait for.
        message: what it does and where, and where the others wait.
        stack: its Python stack; empty where it does not answer.
        ends: whether the run is ended.
    """

    rank: int
    message: str
    stack: str
    ends: bool


def judge(
    reports: Mapping[int, Report],
    silent: Mapping[int, str],
    limit: float,
    before: Mapping[int, Report] | None = None,
) -> Verdict | None:
    """Return which rank hangs; None: the run makes progress.

    A run is ended in the middle of training, where each step takes a time that is known. Start-up
    with the first step, compilation, evaluation and saving take as long as they take: the rank is
    named, and the run is ended only if every rank waits for another, twice in the same place.

    Args:
        reports: of the ranks that have answered, by rank.
        silent: of the others, why they have not.
        limit: seconds without progress.
        before: the reports of the time before, if ranks were asked before.
    """
    if any(report.seconds < limit / 2 for report in reports.values()):
        return None
    kinds = {report.stack.kind for report in reports.values()}
    deadlocked = not silent and kinds == {WAITING}
    unchanged = all(_same(report, (before or {}).get(rank)) for rank, report in reports.items())
    slow = any(report.is_slow or report.stack.compiles for report in reports.values())
    parted = None if silent else _parted(reports)
    first = _first(reports, silent, deadlocked) if parted is None else parted
    others = [reports[rank] for rank in sorted(reports) if rank != first]
    if first in silent:
        what, stack = silent[first], ""
    else:
        report = reports[first]
        stack = report.stack.text
        what = f"no progress for {report.seconds:.0f} s in {report.phase}, at {_where(report)}"
    waits = "; ".join(f"rank {other.rank} is at {_where(other)}" for other in others[:3])
    rest = f", and {len(others) - 3} more" if len(others) > 3 else ""
    cause = "every rank waits for another, in different places: " if deadlocked else ""
    if parted is not None:
        cause, stack = _how_parted(reports, parted), ""  # it waits where it has to
    message = f"{cause}{what}. Meanwhile {waits}{rest}" if others else f"{cause}{what}"
    return Verdict(first, message, stack, ends=not slow or (deadlocked and unchanged))


def _same(now: Report, before: Report | None) -> bool:
    """Return whether a rank has not moved."""
    return before is not None and (now.count, now.collectives, now.stack) == (
        before.count,
        before.collectives,
        before.stack,
    )


def _parted(reports: Mapping[int, Report]) -> int | None:
    """Return the rank that ended training alone, or that goes on alone; None: all do the same."""
    ended = [rank for rank, report in reports.items() if report.ending]
    going = [rank for rank, report in reports.items() if not report.ending]
    if not ended or not going:
        return None
    return min(ended if len(ended) <= len(going) else going)


def _how_parted(reports: Mapping[int, Report], rank: int) -> str:
    ending = next(report.ending for report in reports.values() if report.ending)
    what = "ended training" if reports[rank].ending else "did not end training with the others"
    return f"it {what} {ending}; call loop.stop on every rank at the same step: "


def _first(reports: Mapping[int, Report], silent: Mapping[int, str], deadlocked: bool) -> int:
    """Return the rank that the others wait for."""
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
