"""The mutation gate: every mutant of the conformance table must fail the test of its row.

Run it with ``python -m tests.conformance.gate``; ``--only gather`` takes the rows that contain a
word, ``--sample 8`` every eighth row. Each mutant and its test run in a process forked from this
one, where torch is imported already; so do the workers of tests with several processes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from tests.conformance.rows import Row, id_of

PASSED, FAILED = 0, 1  # pytest's exit codes
BROKEN = 70  # ours: the mutant could not be made
TIMED_OUT = 71
SECONDS = 25.0  # that a mutant may take, beside `TIMES` what its test takes without it
TIMES = 4.0
PLAIN_SECONDS = 300.0
# What pytest-timeout prints, and the tests' helper of several processes.
LATE = re.compile(r"Timeout \(?>|gave no answer within")


@dataclass(frozen=True)
class Outcome:
    """What became of a test in a process of its own.

    Args:
        code: exit code of pytest, `BROKEN` or `TIMED_OUT`.
        output: what it printed.
        seconds: that it took.
    """

    code: int
    output: str
    seconds: float

    @property
    def is_late(self) -> bool:
        """Whether it took too long: a mutant that hangs, or a machine that is too busy."""
        return self.code == TIMED_OUT or bool(LATE.search(self.output))


def preload() -> None:
    """Import what every forked process needs, and nothing that starts threads."""
    import torch
    import torch.distributed
    import torch.optim
    from hypothesis import settings

    import accel.utils
    from accel import Accelerator
    from tests import helpers

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports much more
    settings.register_profile("gate", database=None, derandomize=True)
    settings.load_profile("gate")
    for name in accel.utils.__all__:
        getattr(accel.utils, name)
    assert Accelerator.__name__
    helpers.START_METHOD = "fork"
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at, which would be copied


def run_test(test: str, prepare: Callable[[], None], limit: float) -> int:
    """Run one test in this process, after `prepare`; return pytest's exit code or `BROKEN`."""
    import pytest

    from tests import helpers

    helpers.MAX_SECONDS = limit * 0.6
    try:
        prepare()
    except Exception:
        traceback.print_exc()
        return BROKEN
    arguments = ["-x", "-p", "no:cacheprovider", "-W", "ignore", f"--timeout={limit}"]
    arguments += ["-m", "", "--timeout-method=signal"]  # a test marked slow runs here, too
    return int(pytest.main([*arguments, test]))


class Child:
    """A forked process that runs one test.

    Args:
        test: id of the test.
        prepare: called before, in the process.
        limit: seconds that the test may take.
    """

    def __init__(self, test: str, prepare: Callable[[], None], limit: float) -> None:
        self.limit = limit
        self.started = time.monotonic()
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.output = b""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()  # what the test starts ends with it
            for stream in (1, 2):
                os.dup2(writer, stream)
            code = BROKEN
            with contextlib.suppress(BaseException):
                code = run_test(test, prepare, limit)
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        os.close(writer)

    def poll(self) -> Outcome | None:
        """Return what became of it, None while it runs."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.reader, 65536):
                self.output += part
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.started
        late = seconds > 2 * self.limit
        if pid == 0 and not late:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if pid == 0:
            os.waitpid(self.pid, 0)
        os.close(self.reader)
        code = TIMED_OUT if pid == 0 else os.waitstatus_to_exitcode(status)
        return Outcome(code, self.output.decode(errors="replace"), seconds)


def run_all(jobs: Iterable[tuple[str, Callable[[], None], float]], workers: int) -> list[Outcome]:
    """Run (test, preparation, limit), `workers` at a time; return their outcomes in order."""
    waiting = list(enumerate(jobs))
    running: dict[int, Child] = {}
    outcomes: dict[int, Outcome] = {}
    total = len(waiting)
    bar = track(range(total), description="tests", console=Console(stderr=True), transient=True)
    progress = iter(bar)
    while waiting or running:
        while waiting and len(running) < workers:
            index, job = waiting.pop(0)
            running[index] = Child(*job)
        for index, child in list(running.items()):
            outcome = child.poll()
            if outcome is not None:
                outcomes[index] = outcome
                del running[index]
                next(progress, None)
        time.sleep(0.005)
    next(progress, None)
    return [outcomes[index] for index in range(total)]


def survivors(rows: list[Row], workers: int) -> tuple[list[str], list[str]]:
    """Run every mutant of `rows` against its test.

    Returns:
        One line for each that its test does not reject: because it does not notice, because it
        fails without a mutant, or because the mutant cannot be made. Then the mutants that are
        rejected because their test took too long.
    """
    from tests.conformance.mutants import apply

    tests = sorted({row.test for row in rows})
    plain_jobs = [(id_of(test), lambda: None, PLAIN_SECONDS) for test in tests]
    plain = dict(zip(tests, run_all(plain_jobs, workers), strict=True))
    problems = [
        f"{row}: {row.test} fails without a mutant (exit code {plain[row.test].code})\n"
        f"{_tail(plain[row.test].output)}"
        for row in rows
        if plain[row.test].code != PASSED
    ]
    sound = [row for row in rows if plain[row.test].code == PASSED]
    limits = {test: SECONDS + TIMES * outcome.seconds for test, outcome in plain.items()}
    jobs = [(id_of(row.test), lambda row=row: apply(row), limits[row.test]) for row in sound]
    late: list[str] = []
    for row, outcome in zip(sound, run_all(jobs, workers), strict=True):
        if outcome.code == BROKEN:
            problems.append(f"{row}: the mutant cannot be made\n{_tail(outcome.output)}")
        elif outcome.code == PASSED:
            problems.append(f"{row}: survives {row.test}")
        elif outcome.is_late:
            late.append(str(row))
    return problems, late


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-lines:])


def main() -> int:
    """Print the score; return 1 unless it is 100 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows that contain this")
    parser.add_argument("--part", default="", help="name of a file in tests/conformance/table")
    parser.add_argument("--sample", type=int, default=1, help="every n-th row")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    preload()
    from tests.conformance.table import entries

    rows = [row for entry in entries(options.part) for row in entry.rows()]
    rows = [row for row in rows if options.only in str(row)][:: options.sample]
    start = time.monotonic()
    problems, late = survivors(rows, options.workers)
    console = Console(soft_wrap=True, highlight=False)
    for problem in problems:
        console.print(problem, markup=False)
    killed = len(rows) - len(problems)
    score = 100.0 * killed / len(rows) if rows else 0.0
    console.print(
        f"{killed} of {len(rows)} mutants rejected: {score:.1f} % "
        f"({len({row.test for row in rows})} tests, {time.monotonic() - start:.0f} s), "
        f"{len(late)} of them by a time-out{': ' if late else ''}{', '.join(late)}"
    )
    return 0 if rows and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
