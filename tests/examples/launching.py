"""Runs the scripts in `examples/`: as plain programs, and under torchrun."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import commands
from tests.helpers import ROOT, with_path

EXAMPLES = ROOT / "examples"
SECONDS = 500.0
AT_A_TIME = 2


@dataclass(frozen=True)
class Run:
    """One way to start a script.

    Args:
        script: its name without ``.py``.
        arguments: of its command line.
        processes: that torchrun starts; None: no torchrun.
    """

    script: str
    arguments: tuple[str, ...] = ()
    processes: int | None = None

    def command(self) -> list[str]:
        """Return the interpreter's arguments."""
        script = [str(EXAMPLES / f"{self.script}.py"), "--cpu", *self.arguments]
        if self.processes is None:
            return script
        torchrun = ("--standalone", "--nproc-per-node", str(self.processes))
        return ["-m", "torch.distributed.run", *torchrun, *script]

    def __call__(self) -> subprocess.CompletedProcess[str]:
        """Run it to its end, or fail after `SECONDS`; nothing of it stays."""
        known = with_path(OMP_NUM_THREADS="1")
        return commands.run(*self.command(), cwd=Path.cwd(), environment=known, timeout=SECONDS)


def outputs(*runs: Run) -> list[list[str]]:
    """Run scripts, some at a time, and return what each printed: lines.

    Raises:
        AssertionError: if one did not end well.
    """
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        results = list(pool.map(lambda run: run(), runs))
    for result in results:
        assert result.returncode == 0, f"{result.args}\n{result.stdout}\n{result.stderr}"
        assert "terminate called" not in result.stderr, result.stderr
    return [result.stdout.splitlines() for result in results]


def number_after(word: str, lines: Sequence[str]) -> float:
    """Return the number that follows `word` in the last line that has it."""
    (*_, line) = (line for line in lines if word in line)
    return float(line.split(word)[1].split()[0].strip(",:"))
