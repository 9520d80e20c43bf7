"""One run, one signal in one of its phases, and what became of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accel.checkpoint import files
from accel.errors import AccelError
from runner.job import Job
from tests.helpers import python

ROOT = Path(__file__).resolve().parents[2]
# A shell that starts this in the background lets it ignore Ctrl-C.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from runner.cli import main
sys.exit(main())
"""
RECIPE = (
    *("--import", "tests.signals.recipe", "-cd", str(ROOT / "tests/signals/conf")),
    *("experiment=small", "trainer.log_every=1"),
)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PHASES = ("start", "training", "evaluation", "save")
WAITING_PART = {
    "start": "model",
    "training": "objective",
    "evaluation": "objective",
    "save": "callbacks.small",
}
# A busy machine takes twenty times what an idle one takes.
PATIENCE_SECONDS = 300.0


def children(pid: int) -> list[int]:
    """Return the processes below `pid`, all the way down."""
    found = []
    with contextlib.suppress(OSError):  # it, or a thread of it, has ended meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    """Return whether a process runs; one that merely waits to be collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: object, within: float = PATIENCE_SECONDS) -> bool:
    """Return whether `condition()` becomes true in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


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
    def expected(self) -> tuple[int, bool]:
        """The exit code, and whether a state is saved."""
        if self.signal == signal.SIGINT and self.target != "loader":
            return 130, False
        return 75, True


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


@dataclass(frozen=True)
class Result:
    """What became of a run.

    Attributes:
        code: its exit code.
        saved: whether it has left a whole checkpoint.
        resumable: whether that and the job can be read.
        orphans: how many of its processes were left.
        seconds: from the signal to the end of the parent.
        output: what it printed.
    """

    code: int
    saved: bool
    resumable: bool
    orphans: int
    seconds: float
    output: str

    def fits(self, cell: Cell) -> bool:
        """Return whether this is what a person expects of `cell`."""
        found = self.code, self.saved
        return found == cell.expected and self.resumable == self.saved and self.orphans == 0


class Run:
    """A run that waits in a phase.

    Args:
        cell: what is to happen to it.
        folder: an empty folder.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        part = WAITING_PART[cell.phase]
        arguments = [f"{part}.wait={cell.phase}", f"{part}.folder={folder}"]
        arguments += [f"checkpoint.every_epochs={1 if cell.phase == 'save' else 'null'}"]
        arguments += ["checkpoint.save_best=false", "trainer.epochs=1000000"]
        if cell.loaders:
            arguments.append("dataloader=workers")
        if cell.processes > 1:
            arguments += ["distributed=multi_cpu", f"distributed.num_processes={cell.processes}"]
        self.process = subprocess.Popen(
            python("-c", COMMAND, *RECIPE, *arguments),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def reached(self) -> list[Path]:
        """Return the files that ranks have left in the phase, by rank."""
        return sorted(self.folder.glob(f"{self.cell.phase}_?"))

    def result(self) -> Result:
        """Send the signal once every rank is in the phase, and wait for the end."""
        try:
            return self._result()
        finally:
            for pid in [self.process.pid, *children(self.process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.communicate()

    def _result(self) -> Result:
        waiting = 1 if self.cell.phase == "save" else self.cell.processes  # rank 0 alone writes it
        arrived = wait_until(
            lambda: len(self.reached()) >= waiting or self.process.poll() is not None
        )
        if not arrived or self.process.poll() is not None:
            return self._ended([], time.monotonic())
        everyone = children(self.process.pid)
        begun = time.monotonic()
        for pid in self._targets(everyone):
            os.kill(pid, self.cell.signal)
        (self.folder / "go").touch()
        if self.cell.target == "loader":  # it is ignored: training goes on
            seen = self._lines()
            wait_until(lambda: self._lines() > seen + 3 or self.process.poll() is not None)
            begun = time.monotonic()
            self.process.send_signal(signal.SIGTERM)
        return self._ended(everyone, begun)

    def _targets(self, everyone: list[int]) -> list[int]:
        """Return who gets the signal; of all, who starts others last: children are asked first."""
        rank = int(self.reached()[-1].read_text())
        if self.cell.target == "parent":
            return [self.process.pid]
        if self.cell.target == "rank":
            return [rank]
        if self.cell.target == "loader":
            return children(rank)[:1]
        return [*reversed(everyone), self.process.pid]

    def _lines(self) -> int:
        found = list(self.folder.glob("runs/*/*/metrics.jsonl"))
        return found[0].read_text().count("\n") if found else 0

    def _ended(self, everyone: list[int], begun: float) -> Result:
        try:
            output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            output = "it did not end"
        seconds = time.monotonic() - begun
        wait_until(lambda: not any(map(alive, everyone)), 15.0)
        code = self.process.returncode
        saved, resumable = self._state()
        left = sum(map(alive, everyone))
        return Result(-999 if code is None else code, saved, resumable, left, seconds, output)

    def _state(self) -> tuple[bool, bool]:
        """Return whether there is a whole checkpoint, and whether it and the job can be read."""
        run_dir = next(self.folder.glob("runs/*/*"), None)
        newest = None if run_dir is None else files.newest_complete(run_dir / "checkpoints")
        if run_dir is None or newest is None:
            return False, False
        try:
            files.verify(newest)
            Job.read(run_dir)
        except AccelError:
            return True, False
        return True, True


def run(cell: Cell, folder: Path) -> Result:
    """Run one cell in an empty folder."""
    return Run(cell, folder).result()
