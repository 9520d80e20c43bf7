"""A watchdog: a rank that hangs is named, with its stack, and the run is ended.

A thread of each process watches the main thread's `Progress`. Where that stands still for
`trainer.hang_timeout`, the process requests a report of all ranks, through the store that the
launcher hosts; each answers with its Python stack, which it also writes to its log. The asking
process judges (`runner.launch.hangs`) and shares the verdict. While the run makes progress, one key
of the store is read every few seconds, and the main thread only counts.

A main thread that waits in native code has given the interpreter to others, as all of torch does. A
rank whose interpreter does not run is ended by `faulthandler`, which needs none, with its stack in
its log. A process that is stopped (SIGSTOP) does not answer, and is named by the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.constants import default_pg_timeout

from runner.exit_codes import FAILED
from runner.launch import failures, hangs, rank_logs, torchrun
from runner.launch.hangs import Report, Stack, Verdict
from runner.recipe import processes, user_frames
from runner.recipe.units import parse_duration
from runner.runs import outcomes, sessions
from runner.runs.outcomes import Outcome
from runner.runs.sessions import run_dir_of
from runner.training.stopping import Progress, StopFlag

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from runner.recipe.schema import Recipe

MAX_POLL_SECONDS = 5.0
# Below the process group's own time-out, which would end the run without naming anyone.
OF_GROUP_TIMEOUT = 0.9
# Torch's default for NCCL.
NCCL_TIMEOUT = timedelta(minutes=10)
STORE_TIMEOUT = timedelta(seconds=20)


class Watchdog:
    """Watches the main thread of this process, and answers other ranks that ask.

    It asks after `limit` seconds without progress. Stacks go to the logs of the run directory. The
    store is shared by all ranks, and by no one else. `on_verdict` is called on the judging rank
    with each new verdict; None: there is progress again. `folder` is the session; `alone`: no
    parent shows the end of the log.
    """

    def __init__(
        self,
        progress: Progress,
        limit: float,
        rank: int,
        world_size: int,
        folder: Path,
        store: Store,
        on_verdict: Callable[[Verdict | None], None],
        *,
        alone: bool = False,
    ) -> None:
        self._progress, self._limit, self._store = progress, limit, store
        self._on_verdict = on_verdict
        self._rank, self._world_size = rank, world_size
        self._folder, self._alone = folder, alone
        self._poll = min(MAX_POLL_SECONDS, limit / 10)
        self._log = rank_logs.log_file(run_dir_of(folder), rank).open("a")
        self._seen, self._since = progress.count, time.monotonic()
        self._round = 0
        self._quiet_until = 0.0
        self._verdict_told = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._store.set(f"process/{self._rank}", f"{socket.gethostname()} {os.getpid()}")
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join(STORE_TIMEOUT.total_seconds())
        faulthandler.cancel_dump_traceback_later()
        if not self._thread.is_alive():
            self._log.close()
            if self._world_size == 1:
                with contextlib.suppress(FileNotFoundError):  # somebody has removed the logs
                    _remove_if_empty(Path(self._log.name))
            with contextlib.suppress(RuntimeError):  # the host of the store may have ended
                self._store.set(f"left/{self._rank}", "")

    def _watch(self) -> None:
        while not self._wait(self._poll):
            try:
                self._check()
            except RuntimeError as error:  # torch's errors of the store: its host may have ended
                if self._closing.is_set():
                    return
                self._write(f"The watchdog does not reach the store: {error}")
                self._dump()
                faulthandler.cancel_dump_traceback_later()
                return

    def _wait(self, seconds: float) -> bool:
        """Wait, and return whether the watchdog is closed.

        If the interpreter does not run for the time limit, the process ends, its stacks in its log.
        """
        # A run without a parent, which shows the end of the log, tells it on the terminal.
        place = sys.stderr if self._alone else self._log
        # Before other ranks lose patience, so that its stack is shown; but a store on a busy
        # machine takes seconds.
        seconds_left = self._limit + 2 * self._patience
        faulthandler.dump_traceback_later(seconds_left, exit=True, file=place)
        return self._closing.wait(seconds)

    def _check(self) -> None:
        """Note progress, answer who asks, ask where there is no progress."""
        now = time.monotonic()
        if self._progress.count != self._seen:
            self._seen, self._since, self._quiet_until = self._progress.count, now, 0.0
            if self._verdict_told:
                self._verdict_told = False
                self._on_verdict(None)
        if self._store.check([f"{self._round}/requested"]):
            self._answer()
            self._wait_for_verdict()
        elif now - self._since >= self._limit and now >= self._quiet_until:
            key = f"{self._round}/requested"
            if self._store.add(key, 1) == 1:
                self._answer()
                self._judge()
            else:
                self._answer()
                self._wait_for_verdict()

    # -- answers -------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Write a report of this rank to the store and to its log."""
        seconds = time.monotonic() - self._since
        report = Report(
            self._rank,
            self._progress.count,
            self._progress.phase,
            self._progress.is_slow,
            seconds,
            _collectives(),
            Stack.of_main_thread(),
            self._progress.ending,
        )
        self._store.set(f"{self._round}/{self._rank}", json.dumps(asdict(report)))
        if seconds >= self._limit / 2:
            self._write(f"No progress for {seconds:.0f} s in {report.phase}. All threads:")
            self._dump()

    def _write(self, line: str) -> None:
        self._log.write(f"--- watchdog of rank {self._rank}: {line}\n")
        self._log.flush()

    def _dump(self) -> None:
        faulthandler.dump_traceback(file=self._log, all_threads=True)

    def _wait_for_verdict(self) -> None:
        key = f"{self._round}/verdict"
        deadline = time.monotonic() + 4 * self._patience
        while not self._store.check([key]):
            if time.monotonic() > deadline:  # the asking rank has ended: ask again
                self._round += 1
                return
            if self._wait(min(self._poll, 0.2)):
                return
        self._apply_verdict(json.loads(self._store.get(key)))

    # -- the verdict ---------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        """Seconds within which a rank answers, unless the machine is busy."""
        return 3 * self._poll + 5.0

    def _judge(self) -> None:
        """Collect the answers, and share the verdict."""
        keys = {rank: f"{self._round}/{rank}" for rank in range(self._world_size)}
        deadline = time.monotonic() + 3 * self._patience
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            if self._progress.count != self._seen:
                break
            if self._wait(min(self._poll, 0.2)):
                return
        reports = self._reports(self._round)
        silent = {rank: self._why_silent(rank) for rank in keys.keys() - reports.keys()}
        moved = self._progress.count != self._seen
        before = self._reports(self._round - 1)
        dead = {rank for rank in silent if self._is_dead(rank)}
        verdict = None if moved else hangs.judge(reports, silent, self._limit, before, dead)
        if verdict is not None and (verdict.is_new or verdict.ends):
            self._write(f"rank {verdict.rank}: {verdict.message}")
            self._on_verdict(verdict)
            self._verdict_told = True
        ends = verdict is not None and verdict.ends
        self._store.set(f"{self._round}/verdict", json.dumps(ends))
        self._apply_verdict(ends)

    def _reports(self, number: int) -> dict[int, Report]:
        keys = {rank: f"{number}/{rank}" for rank in range(self._world_size)}
        return {
            rank: Report.from_plain(json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _why_silent(self, rank: int) -> str:
        """Return why a rank does not answer, as far as can be seen from here."""
        if self._store.check([f"left/{rank}"]):
            return "it has left the run"
        host, pid = self._process(rank)
        known = f" (process {pid} on {host})" if pid else ""
        if not self._store.check([f"process/{rank}"]):
            return f"it has not started to build the run{known}"
        return f"it does not answer{known}: it is stopped or gone"

    def _process(self, rank: int) -> tuple[str, str]:
        """Return host and process id of a rank: by itself, or by its parent; empty: not known."""
        if self._store.check([f"process/{rank}"]):
            found = self._store.get(f"process/{rank}").decode()
        else:
            found = outcomes.read_processes(self._folder).get(rank, "")
        host, _, pid = found.partition(" ")
        return host, pid

    def _is_dead(self, rank: int) -> bool:
        """Return whether a rank that has begun does not answer, though it has not left the run."""
        return self._store.check([f"process/{rank}"]) and not self._store.check([f"left/{rank}"])

    def _apply_verdict(self, ends: bool) -> None:
        if ends:
            self._write("the run is ended")
            os._exit(FAILED)
        self._round += 1
        self._quiet_until = time.monotonic() + self._limit


def _remove_if_empty(path: Path) -> None:
    if not path.stat().st_size:
        path.unlink()


def _collectives() -> int | None:
    """Return how many collectives the default process group has started; None: not known."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    if count is None:
        return None
    with contextlib.suppress(RuntimeError):  # a backend that does not count
        return int(count())
    return None


def limit_of(recipe: Recipe) -> float | None:
    """Return the seconds without progress after which reports are requested; None: never."""
    limit = parse_duration(recipe.trainer.hang_timeout, "trainer.hang_timeout")
    if limit is None:
        return None
    group = recipe.distributed.init.timeout
    if group is None:
        on_cpu = processes.device(recipe.distributed) == "cpu" or not processes.num_accelerators()
        group = default_pg_timeout if on_cpu else NCCL_TIMEOUT
    return min(limit, OF_GROUP_TIMEOUT * group.total_seconds())


@contextlib.contextmanager
def watching(
    recipe: Recipe, folder: Path, stop: StopFlag, rank: int, world_size: int
) -> Iterator[None]:
    """Watch this process in the context, if the recipe wants it.

    `folder` is the session. `stop` has the progress of the main thread, and knows of a parent.
    """
    limit = limit_of(recipe)
    if limit is None:
        yield
        return
    several = world_size > 1
    store = torchrun.connect("watchdog", STORE_TIMEOUT) if several else HashStore()
    has_parent = stop.session is not None
    alone = not several and not has_parent
    on_verdict = partial(_report_alone, folder) if alone else partial(_report, folder, has_parent)
    dog = Watchdog(stop.progress, limit, rank, world_size, folder, store, on_verdict, alone=alone)
    dog.start()
    try:
        yield
    finally:
        dog.close()


def _report(folder: Path, has_parent: bool, verdict: Verdict | None) -> None:
    """Report to the parent and the terminal which rank hangs; None: it makes progress again."""
    if has_parent:
        outcomes.note_hang(folder, None if verdict is None else _outcome(verdict))
    if not has_parent or verdict is None or not verdict.ends:  # else the parent reports it
        _print(verdict)


def _report_alone(folder: Path, verdict: Verdict | None) -> None:
    """Report that a run of one process hangs, which has no parent: its end is recorded, too."""
    if verdict is None or not verdict.ends:
        _print(verdict)
        return
    outcome = _outcome(verdict)
    sessions.end(folder, outcome.code, cause=asdict(outcome))
    failures.print_failure(outcome, run_dir_of(folder))


def _print(verdict: Verdict | None) -> None:
    line = "The run makes progress again."
    if verdict is not None:
        line = f"rank {verdict.rank} hangs: {verdict.message}"
    print(line, file=rank_logs.terminal(), flush=True)


def _outcome(verdict: Verdict) -> Outcome:
    # A hang that is only suspected explains errors of communication, and nothing else.
    return Outcome(
        verdict.rank,
        time.time() if verdict.ends else 0.0,
        FAILED,
        f"it hangs: {verdict.message}",
        user_frames.shortened(verdict.stack),
        is_consequence=not verdict.ends,
    )
