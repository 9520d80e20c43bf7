"""A rank that hangs is named with its stack, and the run is ended.

A thread of each process watches the `Progress` of its main thread. Once that has stood still for
the time limit on any rank, every rank writes its stack to its log and its position to the store
that the launcher hosts. The rank whose time was up first names the one that hangs, with a table of
all, and all end. While the run makes progress, one key of the store is read every few seconds, and
the main thread only counts.

The limit is `trainer.hang_timeout` from the first finished step on; between two steps it is below
the time-out of the process group, which would end the run without naming anyone. Start-up takes as
long as it takes: ranks that wait for each other there meet the process group's own time-out, and
everything else ends after `START_SECONDS`.

A main thread that waits in native code has given the interpreter to others, as all of torch does. A
rank whose interpreter does not run is ended by `faulthandler`, which needs none, with its stack in
its log, before the others give up waiting for its answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import HashStore
from torch.distributed.constants import default_pg_timeout

from accel.strategies.table import specs
from runner.exit_codes import FAILED
from runner.launch import failures, rank_logs, store
from runner.recipe import processes, user_frames
from runner.recipe.units import parse_duration
from runner.runs import sessions
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of
from runner.training.stopping import TRAINING, Progress, StopFlag

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from runner.recipe.schema import Recipe

START_SECONDS = 2 * 3600.0
MAX_POLL_SECONDS = 5.0
OF_GROUP_TIMEOUT = 0.9
# Torch's default for NCCL.
NCCL_TIMEOUT = timedelta(minutes=10)
STORE_TIMEOUT = timedelta(seconds=20)
MOST_ROWS = 16  # of the table
# Calls into these packages wait for other ranks, or for a device that does.
_WAITING = ("/torch/", "/accel/comm/", *(f"/{name}/" for one in specs() for name in one.packages))
_LOADING = "/torch/utils/data/"


@dataclass(frozen=True)
class Row:
    """Where a rank is.

    Attributes:
        count: what its main thread has completed.
        steps: optimizer steps among them.
        phase: what it does.
        seconds: time since its last progress.
        ending: why training has ended on it, and when; empty: it has not.
        waits: whether it is in torch, and perhaps waits for other ranks.
        place: file, line and function: the innermost of the user's code, where there is any.
        stack: the Python stack of its main thread: the user's frames, where there are any.
    """

    count: int
    steps: int
    phase: str
    seconds: float
    ending: str
    waits: bool
    place: str
    stack: str

    @classmethod
    def here(cls, progress: Progress, seconds: float) -> Row:
        """Return the row of this process."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = traceback.extract_stack(frame)
        own = [line for line in stack if user_frames.is_own(line.filename)]
        last = (own or stack)[-1]
        return cls(
            progress.count,
            progress.steps,
            progress.phase,
            seconds,
            progress.ending,
            waits([line.filename for line in stack]),
            f"{last.filename}:{last.lineno} in {last.name}",
            "".join(traceback.format_list(own or stack)),
        )


def waits(files: list[str]) -> bool:
    """Return whether a thread with such files on its stack may wait for other ranks."""
    if any(file.startswith("<frozen importlib") for file in files):
        return False  # it imports, perhaps a module of torch's
    return any(part in files[-1] for part in _WAITING) and _LOADING not in files[-1]


def judge(rows: Mapping[int, Row], silent: Collection[int]) -> Outcome:
    """Return how the rank ends that hangs.

    It is one that does not answer; else one that has ended training without the others, or has not
    ended it with them; else one that does not wait, or is behind.
    """
    ended = Counter(bool(row.ending) for row in rows.values())

    def suspicion(rank: int) -> tuple[object, ...]:
        row = rows[rank]
        return ended[bool(row.ending)], not row.ending, row.waits, row.count, rank

    rank = min(silent) if silent else min(rows, key=suspicion)
    table = _table(rows, silent, rank)
    if silent:
        message = "its process does not answer: it is stopped, or has not begun"
        return Outcome(rank, time.time(), FAILED, f"it hangs: {message}", table)
    row, cause = rows[rank], ""
    if len(ended) == 2:
        ending = next(one.ending for one in rows.values() if one.ending)
        what = "ended training" if row.ending else "did not end training with the others"
        cause = f"it {what} {ending}; call loop.stop on every rank at the same step: "
    message = f"it hangs: {cause}no progress for {row.seconds:.0f} s in {row.phase}, at {row.place}"
    return Outcome(rank, time.time(), FAILED, message, row.stack + table)


def _table(rows: Mapping[int, Row], silent: Collection[int], first: int) -> str:
    """Return a line for each rank, the one that hangs first."""
    lines = [f"{'rank':>4} {'steps':>6}  phase: place"]
    ranks = sorted([*rows, *silent], key=lambda rank: (rank != first, rank))
    for rank in ranks[:MOST_ROWS]:
        row = rows.get(rank)
        told = "does not answer" if row is None else f"{row.phase}: {row.place}"
        lines.append(f"{rank:4} {'?' if row is None else row.steps:>6}  {told}")
    if len(ranks) > MOST_ROWS:
        lines.append(f"and {len(ranks) - MOST_ROWS} more ranks")
    return "\n".join(lines)


class Watchdog:
    """Watches the main thread of this process, and answers when the time of another rank is up.

    Args:
        stop: has the progress of the main thread, and knows of a parent, which reports the end.
        limits: seconds without progress: between two steps, and in any other phase.
        rank: of this process.
        world_size: number of ranks.
        folder: the session; stacks go to the logs of its run.
        store: shared by all ranks, and by no one else.
    """

    def __init__(
        self,
        stop: StopFlag,
        limits: tuple[float, float],
        rank: int,
        world_size: int,
        folder: Path,
        store: Store,
    ) -> None:
        self._stop, self._progress = stop, stop.progress
        (self._limit, self._longest), self._store = limits, store
        self._rank, self._world_size, self._folder = rank, world_size, folder
        self._poll = min(MAX_POLL_SECONDS, self._limit / 10)
        # Within which a rank answers, unless the machine is busy.
        self._patience = 3 * self._poll + 5.0
        self._log = rank_logs.log_file(run_dir_of(folder), rank).open("a")
        self._seen, self._since = self._progress.count, time.monotonic()
        self._closing, self._is_ending = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join(STORE_TIMEOUT.total_seconds())
        if not self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the host of the store may have ended
                self._store.set(f"left/{self._rank}", "")
            if self._log.tell() == 0 and self._world_size == 1:
                Path(self._log.name).unlink(missing_ok=True)
            self._log.close()

    def _watch(self) -> None:
        try:
            while not self._wait(self._poll):
                now = time.monotonic()
                if self._progress.count != self._seen:
                    self._seen, self._since = self._progress.count, now
                is_up = now - self._since >= self._current_limit
                if is_up or self._store.check(["asked"]):
                    self._end(now - self._since, asks=is_up and self._store.add("asked", 1) == 1)
        except RuntimeError as error:  # torch's errors of the store: its host may have ended
            if self._is_ending:  # so has the rank that hosts the store
                os._exit(FAILED)
            if not self._closing.is_set():
                self._write(f"no connection to the store: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()

    @property
    def _current_limit(self) -> float:
        if not self._progress.is_timed:
            return max(self._longest, START_SECONDS)
        return self._limit if self._progress.phase == TRAINING else self._longest

    def _wait(self, seconds: float) -> bool:
        """Wait, and return whether the watchdog is closed.

        If the interpreter does not run for the time limit, the process ends, its stacks in its log;
        those of a run without a parent, which shows the end of the log, on the terminal.
        """
        alone = self._world_size == 1 and self._stop.session is None
        place = sys.stderr if alone else self._log
        # Also before the first step: it may keep the interpreter before this thread hears of it.
        limit = self._limit + 2 * self._patience
        faulthandler.dump_traceback_later(limit, exit=True, file=place)
        return self._closing.wait(seconds)

    def _write(self, line: str) -> None:
        self._log.write(f"--- watchdog of rank {self._rank}: {line}\n")
        self._log.flush()
        faulthandler.dump_traceback(file=self._log, all_threads=True)

    def _end(self, seconds: float, *, asks: bool) -> None:
        """End this process once the rank that asks has reported which one hangs."""
        self._is_ending = True
        row = Row.here(self._progress, seconds)
        self._store.set(f"row/{self._rank}", json.dumps(asdict(row)))
        self._write(f"no progress for {seconds:.0f} s in {row.phase}. All threads:")
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._await([f"row/{rank}" for rank in others] if asks else ["told"])
        self._is_ending = not self._closing.is_set()
        if not self._is_ending:  # the main thread has met an error: another rank has ended
            return
        if asks:
            found = {rank: f"row/{rank}" for rank in others if self._store.check([f"row/{rank}"])}
            rows = {rank: Row(**json.loads(self._store.get(key))) for rank, key in found.items()}
            left = {rank for rank in others if self._store.check([f"left/{rank}"])}
            self._report(judge({self._rank: row, **rows}, {*others} - rows.keys() - left))
            self._store.set("told", "")
        os._exit(FAILED)

    def _await(self, keys: list[str]) -> None:
        deadline = time.monotonic() + 3 * self._patience
        while not self._store.check(keys) and time.monotonic() < deadline:
            if self._wait(min(self._poll, 0.2)):
                return

    def _report(self, outcome: Outcome) -> None:
        outcome.write(self._folder)
        if self._stop.session is None:
            sessions.end(self._folder, outcome.code, cause=asdict(outcome))
            place = run_dir_of(self._folder)
            failures.print_failure(outcome, place, self._world_size, rank_logs.terminal())


def limits_of(recipe: Recipe, world_size: int) -> tuple[float, float] | None:
    """Return the seconds without progress after which a run ends, between steps and else.

    None: never.
    """
    longest = parse_duration(recipe.trainer.hang_timeout, "trainer.hang_timeout")
    if longest is None or world_size == 1:
        return None if longest is None else (longest, longest)
    group = recipe.distributed.init.timeout
    if group is None:
        on_cpu = processes.device(recipe.distributed) == "cpu" or not processes.num_accelerators()
        group = default_pg_timeout if on_cpu else NCCL_TIMEOUT
    return min(longest, OF_GROUP_TIMEOUT * group.total_seconds()), longest


@contextlib.contextmanager
def watching(
    recipe: Recipe, folder: Path, stop: StopFlag, rank: int, world_size: int
) -> Iterator[None]:
    """Watch this process in the context, if the recipe wants it; `folder` is the session."""
    limits = limits_of(recipe, world_size)
    if limits is None:
        yield
        return
    shared = store.connect("watchdog", STORE_TIMEOUT) if world_size > 1 else HashStore()
    dog = Watchdog(stop, limits, rank, world_size, folder, shared)
    try:
        yield
    finally:
        dog.close()
