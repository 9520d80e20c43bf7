"""One run, one signal in one of its phases, and what became of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT, alive, python, wait_until
from tests.signals.oracle import (
    PATIENCE_SECONDS,
    Command,
    Expected,
    Result,
    Resumed,
    State,
    command,
    kill,
    marked,
)

# A shell that starts this in the background lets it ignore Ctrl-C.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from runner.cli import main
sys.exit(main())
"""
RECIPE = (
    *("--import", "tests.signals.recipe", "-cd", str(ROOT / "tests/signals/conf")),
    *("experiment=small", "trainer.log_every=1", "trainer.sanity_steps=0"),
)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PHASES = ("start", "training", "evaluation", "save")
WAITING_PART = {
    "start": "model",
    "training": "objective",
    "evaluation": "objective",
    "save": "callbacks.small",
}
WORKERS = 2  # of each rank
WORKERS_SECONDS = 60.0  # until each of them has read a sample
# Where a run is not to save when it is struck, it has saved before: once in so many steps.
EVERY_STEPS = 2


def children(pid: int) -> list[int]:
    """Return the processes below `pid`, all the way down."""
    found = []
    with contextlib.suppress(OSError):  # it, or a thread of it, has ended meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


@dataclass(frozen=True)
class Cell:
    """Which signal reaches whom, and when.

    Attributes:
        signal: the signal.
        target: "parent", "rank" (the last one), "loader" (a worker of that rank) or "all".
        loaders: whether batches are read by loader workers.
        phase: one of `PHASES`.
        processes: number of training processes.
    """

    signal: signal.Signals
    target: str
    loaders: bool
    phase: str
    processes: int = 2

    def __str__(self) -> str:
        workers = "workers" if self.loaders else "none"
        return (
            f"{self.signal.name:7} {self.target:6} {workers:7} {self.phase:10} {self.processes:2}"
        )

    @property
    def expected(self) -> Expected:
        """What a person expects of it."""
        every = self.target == "all"  # starting again takes as long as a cell: some are enough
        workers = None if self.phase == "start" else WORKERS * self.loaders
        if self.signal != signal.SIGINT or self.target == "loader":
            resumes = every and self.signal == signal.SIGTERM
            return Expected(75, saves=True, resumes=resumes, workers=workers)
        if self.phase == "start":
            return Expected(130, saves=False, workers=workers)
        resumes = every and self.loaders
        return Expected(130, saves=False, every_steps=EVERY_STEPS, resumes=resumes, workers=workers)


def cells(processes: tuple[int, ...] = (2, 1)) -> Iterator[Cell]:
    """Yield every cell of the matrix."""
    for number, loaders, phase, count in itertools.product(
        SIGNALS, (False, True), PHASES, processes
    ):
        yield Cell(number, "parent", loaders, phase, count)
        yield Cell(number, "all", loaders, phase, count)
        if count > 1:
            yield Cell(number, "rank", loaders, phase, count)
        if loaders and phase != "start":  # there are none yet
            yield Cell(number, "loader", loaders, phase, count)


class Run:
    """A run that waits in a phase.

    Args:
        cell: what is to happen to it.
        folder: an empty folder.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder, self.mark = cell, folder, secrets.token_hex(16)
        part, every = WAITING_PART[cell.phase], cell.expected.every_steps
        arguments = [f"{part}.wait={cell.phase}", f"{part}.folder={folder}"]
        arguments += ["callbacks.small.tells=true", f"data.folder={folder}"]
        if cell.phase != "save":
            arguments.append(f"callbacks.small.folder={folder}")
        elif every is not None:  # the one before is to be kept
            arguments.append("callbacks.small.nth=2")
        in_epochs = cell.phase == "save" and every is None
        arguments.append(f"checkpoint.every_epochs={1 if in_epochs else 'null'}")
        if every is not None:
            arguments.append(f"checkpoint.every_steps={every}")
        arguments += ["checkpoint.keep_best=0", "trainer.epochs=1000000"]
        if cell.loaders:
            arguments += ["dataloader=workers", f"dataloader.num_workers={WORKERS}"]
        if cell.processes > 1:
            arguments += ["distributed=multi_cpu", f"distributed.num_processes={cell.processes}"]
        line = python("-c", COMMAND, *RECIPE, *arguments)
        self.command = Command(line, folder / "output", self.mark)
        self.process = self.command.process
        self.mishaps: list[str] = []
        self.arrival, self.begun = 0.0, time.monotonic()

    def reached(self) -> list[Path]:
        """Return the files that ranks have left in the phase, by rank."""
        return sorted(self.folder.glob(f"{self.cell.phase}_?"))

    def result(self) -> Result:
        """Send the signal once every rank is in the phase, and wait for the end."""
        try:
            return self._result()
        finally:
            self._kill()

    def _kill(self) -> None:
        self.process.kill()
        kill(self.mark)
        self.process.wait()

    def _result(self) -> Result:
        waiting = 1 if self.cell.phase == "save" else self.cell.processes  # rank 0 alone writes it
        self._await(lambda: len(self.reached()) >= waiting, "the phase was not reached")
        if self.mishaps:
            return self._ended(State(), (), time.monotonic())
        workers = self._workers()
        before = State.read(self._run_dir())
        targets = self._targets(workers)
        if not targets:
            self.mishaps.append("there is nobody to strike")
        begun = time.monotonic()
        self.arrival = begun - self.begun
        for pid in targets:
            try:
                os.kill(pid, self.cell.signal)
            except ProcessLookupError:
                self.mishaps.append(f"process {pid} had ended before it was struck")
        (self.folder / "go").touch()
        if self.cell.target == "loader":  # it is ignored: training goes on
            seen = self._last_step()
            self._await(lambda: self._last_step() > seen + 3, "training did not go on")
            if not all(map(alive, targets)):
                self.mishaps.append("the loader worker has ended")
            begun = time.monotonic()
            self.process.send_signal(signal.SIGTERM)
        counts = tuple(len(found) for found in workers)
        return self._ended(before, counts, begun)

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for `condition`; a run that ends or hangs meanwhile is a mishap."""
        if not wait_until(lambda: condition() or self.process.poll() is not None):
            self.mishaps.append(f"{otherwise} in {PATIENCE_SECONDS:.0f} seconds")
        elif self.process.poll() is not None:
            self.mishaps.append(f"{otherwise}: it ended before, with {self.process.returncode}")

    def _workers(self) -> list[list[int]]:
        """Return the loader workers of each rank that read what the phase reads."""
        split = "validation" if self.cell.phase == "evaluation" else "train"
        expected = self.cell.expected.workers

        def found() -> list[list[int]]:
            each = []
            for rank in range(self.cell.processes):
                told = [line.split() for line in self._told(f"workers_{rank}")]
                below = set(children(self._rank(rank)))
                mine = [int(pid) for pid, read in told if read == split]
                each.append([pid for pid in mine if pid in below and alive(pid)])
            return each

        if expected:  # the last of them may not have read a sample yet
            wait_until(lambda: all(len(mine) >= expected for mine in found()), WORKERS_SECONDS)
        return found()

    def _rank(self, rank: int) -> int:
        """Return the process of a rank: in a save, only rank 0 waits in the phase."""
        place = self.folder / f"{self.cell.phase}_{rank}"
        if place.exists():
            return int(place.read_text())
        return int(self._told(f"steps_{rank}")[-1].split()[0])

    def _targets(self, workers: list[list[int]]) -> list[int]:
        """Return who gets the signal; of all, who starts others last: children are asked first."""
        last = self.cell.processes - 1
        if self.cell.target == "parent":
            return [self.process.pid]
        if self.cell.target == "rank":
            return [self._rank(last)]
        if self.cell.target == "loader":
            return workers[last][:1]
        return [*reversed(children(self.process.pid)), self.process.pid]

    def _told(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def _made(self) -> tuple[tuple[int, ...], ...]:
        """Return the steps that each rank has made."""
        lines = [self._told(f"steps_{rank}") for rank in range(self.cell.processes)]
        return tuple(tuple(int(line.split()[1]) for line in rank) for rank in lines)

    def _last_step(self) -> int:
        """Return the last step that every rank has made."""
        return min((steps[-1] if steps else 0 for steps in self._made()), default=0)

    def _run_dir(self) -> Path | None:
        return next(self.folder.glob("runs/*/*"), None)

    def _ended(self, before: State, workers: tuple[int, ...], begun: float) -> Result:
        code = self.command.code()
        seconds = time.monotonic() - begun
        wait_until(lambda: not marked(self.mark), 15.0)
        left = tuple(f"{pid} {command(pid)}" for pid in marked(self.mark))
        if code is None:
            self.mishaps.append("it did not end")
        self._kill()
        result = Result(
            -999 if code is None else code,
            self._made(),
            before,
            State.read(self._run_dir()),
            left,
            seconds,
            workers,
            self.arrival,
            tuple(self.mishaps),
            output=self.command.printed(),
        )
        if self.cell.expected.resumes and not self.mishaps and result.after.saved is not None:
            return result.with_(resumed=self._resumed(result))
        return result

    def _resumed(self, result: Result) -> Resumed:
        """Go on for one step."""
        (self.folder / "go").touch()
        next_step = (result.after.saved or 0) + 1
        arguments = (f"resume={self._run_dir()}", f"trainer.stop_after={next_step}")
        line = python("-c", COMMAND, *RECIPE[:2], *arguments)
        self.command = Command(line, self.folder / "resumed", self.mark)
        self.process = self.command.process
        code = self.command.code()
        self._kill()
        made = tuple(
            steps[len(earlier) :] for steps, earlier in zip(self._made(), result.made, strict=True)
        )
        ended = -999 if code is None else code
        return Resumed(ended, made, State.read(self._run_dir()), self.command.printed())


def run(cell: Cell, folder: Path) -> Result:
    """Run one cell in an empty folder."""
    return Run(cell, folder).result()
