"""Every way to start a run, each ended from outside: nothing stays behind.

``python -m tests.signals.starts`` prints the table: what was left, and after how many seconds
nothing was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import free_port, python
from tests.signals.cells import COMMAND, RECIPE, children, wait_until
from tests.signals.oracle import Command, command, kill, marked

# Until nothing is left: a busy machine takes twenty times what an idle one takes.
GONE_SECONDS = 90.0
START_SECONDS = 400.0
STARTS = ("none", "multi_cpu", "multi_node", "torchrun", "mpirun", "launch", "sweep")
STRIKES = ("SIGINT", "SIGTERM", "kill parent", "kill worker", "kill node")
WAITING = ("objective.wait=training", "objective.folder=.", "checkpoint.every_steps=1")
WAITING += ("trainer.epochs=1000",)
SCRIPT = """
import os
from accel import Accelerator
from tests.signals.recipe import wait_in
accelerator = Accelerator(cpu=True)
wait_in(".", "training")
accelerator.wait_for_everyone()
accelerator.end_training()
"""


@dataclass(frozen=True)
class Cell:
    """A way to start two processes (`none`, `sweep`: one), and a way to end them.

    Attributes:
        start: a key of `STARTS`.
        strike: "SIGINT" or "SIGTERM" to the command; "kill parent", "kill worker" (of the last
            rank) and "kill node" (all processes of the second node) are SIGKILL.
    """

    start: str
    strike: str

    def __str__(self) -> str:
        return f"{self.start:10} {self.strike:12}"

    @property
    def ranks(self) -> int:
        """Number of training processes."""
        return 1 if self.start in ("none", "sweep") else 2


def cells() -> Iterator[Cell]:
    """Yield every cell that there is here."""
    for start in STARTS:
        for strike in STRIKES:
            if strike == "kill node" and start != "multi_node":
                continue  # one node: that is all of its processes
            if start == "mpirun" and shutil.which("mpirun") is None:
                continue
            yield Cell(start, strike)


@dataclass(frozen=True)
class Result:
    """What became of a cell.

    Attributes:
        codes: exit codes of the commands.
        seconds: from the strike until no process was left.
        left: command lines of those that were left.
        output: what the commands printed.
    """

    codes: tuple[int | None, ...]
    seconds: float
    left: tuple[str, ...]
    output: str

    def problems(self, cell: Cell) -> list[str]:
        """Return what is not as a person expects."""
        found = [f"orphan: {line}" for line in self.left]
        if None in self.codes:
            found.append("a command did not end")
        expected = {"SIGINT": 130, "SIGTERM": 75}.get(cell.strike)
        if cell.start in ("torchrun", "mpirun", "launch"):
            expected = None  # the launcher's own code
        if expected is not None and any(code != expected for code in self.codes):
            found.append(f"exit codes {self.codes}, not {expected}")
        if cell.strike.startswith("kill") and all(code == 0 for code in self.codes):
            found.append("a killed run passes for a complete one")
        return found


def _lines(cell: Cell, folder: Path) -> list[list[str]]:
    """Return the command lines of a cell: one, or one of each node."""
    run = python("-c", COMMAND, *RECIPE, *WAITING)
    two = ["distributed.num_processes=2"]
    if cell.start == "none":
        return [run]
    if cell.start == "multi_cpu":
        return [[*run, "distributed=multi_cpu", *two]]
    if cell.start == "multi_node":
        endpoint = f"distributed.rdzv_endpoint=127.0.0.1:{free_port()}"
        line = [*run, "distributed=multi_node", endpoint, "distributed.num_processes=1"]
        return [[*line, f"distributed.node_rank={node}"] for node in (0, 1)]
    if cell.start == "torchrun":
        module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return [[*python(*module, "-m", "runner"), *RECIPE, *WAITING, "distributed=multi_cpu"]]
    if cell.start == "mpirun":
        prefix = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
        return [[*prefix, *run, "distributed=multi_cpu"]]
    if cell.start == "launch":
        (folder / "train.py").write_text(SCRIPT)
        return [
            python("-m", "accel.commands", "launch", "--cpu", "--num_processes", "2", "train.py")
        ]
    # A sweep goes on after a job that was killed, and its next job would wait.
    seeds = "seed=0" if cell.strike == "kill worker" else "seed=0,1"
    return [[*python("-c", COMMAND, "-m"), *RECIPE, *WAITING, seeds]]


class Started:
    """The commands of a cell, up to the phase in which they are struck."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder, self.mark = cell, folder, secrets.token_hex(16)
        self.commands = [
            # The test's own process group is not theirs.
            Command(line, folder / f"output_{number}", self.mark, session=True)
            for number, line in enumerate(_lines(cell, folder))
        ]
        self.processes = [one.process for one in self.commands]

    def worker(self, rank: int) -> Path:
        """Return the file in which a rank that waits leaves its process id."""
        places = [self.folder, *self.folder.glob("runs/*/*/*")]
        found = (place / f"training_{rank}" for place in places)
        return next((path for path in found if path.exists()), self.folder / f"training_{rank}")

    def result(self) -> Result:
        """Strike once every rank waits, and see what is left."""
        last = self.cell.ranks - 1
        begun = wait_until(
            lambda: (
                all(self.worker(rank).exists() for rank in range(last + 1))
                or any(one.poll() is not None for one in self.processes)
            ),
            START_SECONDS,
        )
        if not begun or not self.worker(last).exists():
            raise RuntimeError(f"{self.cell} did not begin to train:\n{self.output()}")
        struck = time.monotonic()
        for pid, number in self._targets():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if self.cell.strike == "SIGTERM":
            (self.folder / "go").touch()  # they save at the end of the step
        wait_until(lambda: not self._left(), GONE_SECONDS)
        seconds = time.monotonic() - struck
        left = tuple(f"{pid} {command(pid)}" for pid in self._left())
        codes = tuple(one.code(5.0) for one in self.commands)
        return Result(codes, seconds, left, self.output())

    def _targets(self) -> list[tuple[int, signal.Signals]]:
        strike, parent = self.cell.strike, self.processes[-1].pid
        if strike in ("SIGINT", "SIGTERM"):
            return [(parent, signal.Signals[strike])]
        if strike == "kill parent":
            return [(self.processes[0].pid, signal.SIGKILL)]
        if strike == "kill worker":
            pid = int(self.worker(self.cell.ranks - 1).read_text())
            return [(pid, signal.SIGKILL)]
        return [(pid, signal.SIGKILL) for pid in (parent, *children(parent))]

    def _left(self) -> list[int]:
        for one in self.processes:
            one.poll()
        return marked(self.mark)

    def output(self) -> str:
        """Return what the commands have printed."""
        return "\n".join(one.printed() for one in self.commands)

    def kill(self) -> None:
        """Kill what is left."""
        kill(self.mark)
        for one in self.commands:
            one.code(30.0)


def run(cell: Cell, folder: Path) -> Result:
    """Run one cell in an empty folder."""
    started = Started(cell, folder)
    try:
        return started.result()
    finally:
        started.kill()


def main() -> int:
    """Run the cells, print each, and return 0 if all are as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.signals.starts", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cells whose line has all of these words")
    words = set(parser.parse_args().words)
    chosen = [cell for cell in cells() if words <= set(str(cell).split())]
    print("start      strike       left seconds codes", flush=True)
    good = 0
    for cell in chosen:
        with tempfile.TemporaryDirectory() as folder:
            result = run(cell, Path(folder))
        problems = result.problems(cell)
        codes = " ".join(map(str, result.codes))
        print(f"{cell} {len(result.left):4} {result.seconds:7.1f} {codes}", flush=True)
        for problem in problems:
            print(f"    {problem}", flush=True)
        good += not problems
    print(f"{good} of {len(chosen)} cells as expected")
    return 0 if good == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
