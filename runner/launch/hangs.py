"""Which rank hangs, judged from the Python stacks of all ranks. Free of torch."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.strategies.table import specs

_ROOT = Path(__file__).absolute().parents[2]
_PACKAGES = (
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    str(_ROOT / "runner") + "/",
    str(_ROOT / "accel") + "/",
    "/site-packages/",
    "<",
)
# Innermost files of a thread that waits for other ranks.
_COLLECTIVES = (
    *("/torch/distributed/", "/accel/comm/"),
    *(f"/{name}/" for spec in specs() for name in spec.packages),
)
_THROUGH = ("/torch/_ops.py", "/torch/utils/_contextlib.py")  # calls of others pass through here
_BACKWARD = "_engine_run_backward"  # waits in native code for the gradients of other ranks
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/")

# Time limits without any progress that a phase of unknown duration may take.
SLOW_LIMITS = 6
BUSY, IN_TORCH, WAITING = "busy", "in torch", "waiting"


@dataclass(frozen=True)
class Place:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """The Python stack of a thread, outermost call first.

    `text` is as a traceback shows it: the user's own lines, where there are any.
    """

    places: tuple[Place, ...]
    text: str

    @classmethod
    def of_main_thread(cls) -> Stack:
        """Return the stack of this process's main thread, as it is now."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        summary = traceback.extract_stack(frame)
        places = tuple(Place(line.filename, line.lineno or 0, line.name) for line in summary)
        own = [line for line in summary if _is_own(line.filename)]
        return cls(places, "".join(traceback.format_list(own or list(summary))))

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Stack:
        """Return the stack that `plain` describes."""
        return cls(tuple(Place(**place) for place in plain["places"]), plain["text"])

    @property
    def own(self) -> Place:
        """The innermost line of the user's code; where there is none, the innermost of all."""
        found = (place for place in reversed(self.places) if _is_own(place.file))
        return next(found, self.places[-1])

    @property
    def kind(self) -> str:
        """Activity of the thread: "waiting" for other ranks, "in torch", or else "busy"."""
        if any(place.file.startswith("<frozen importlib") for place in self.places):
            return BUSY  # it imports, perhaps a module of torch's
        inner = next(p for p in reversed(self.places) if not p.file.endswith(_THROUGH))
        if inner.function == _BACKWARD or any(part in inner.file for part in _COLLECTIVES):
            return WAITING
        in_torch = "/torch/" in inner.file and "/torch/utils/data/" not in inner.file
        return IN_TORCH if in_torch else BUSY

    @property
    def compiles(self) -> bool:
        """Whether a model is being compiled."""
        return any(part in place.file for place in self.places for part in _COMPILERS)


def _is_own(file: str) -> bool:
    return not any(part in file for part in _PACKAGES)


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
    before: Mapping[int, Report],
    dead: Set[int] = frozenset(),
) -> Verdict | None:
    """Return which rank hangs; None: the run makes progress.

    A run is ended in the middle of training, where each step takes a time that is known. Start-up
    with the first step, compilation, evaluation and saving take as long as they take: the rank is
    named, and the run is ended only if every rank waits for another, twice in the same place, if a
    process that had begun does not answer, or after `SLOW_LIMITS` time limits.

    Args:
        reports: of the ranks that have answered.
        silent: why the other ranks have not.
        limit: seconds without progress.
        before: the previous reports.
        dead: the silent ranks that had begun, and have not left.
    """
    if any(report.seconds < limit / 2 for report in reports.values()):
        return None
    kinds = {report.stack.kind for report in reports.values()}
    deadlocked = not silent and kinds == {WAITING} and len(reports) > 1
    unchanged = reports.keys() == before.keys() and all(
        before[rank].state == report.state and before[rank].seconds >= limit / 2
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
    too_long = min(report.seconds for report in reports.values()) >= SLOW_LIMITS * limit
    ends = not slow or (deadlocked and unchanged) or bool(dead) or too_long
    return Verdict(first, message, stack, ends, is_new=not unchanged)


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
