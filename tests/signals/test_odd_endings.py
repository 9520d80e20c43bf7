"""R9, R10: endings by user code: exit code, culprit, the user's frame, no orphans."""

from __future__ import annotations

import os
import secrets
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import python
from tests.signals.cells import COMMAND, RECIPE, ROOT, wait_until
from tests.signals.oracle import Command, kill, marked

OWN = 'tests/signals/recipe.py", line '
LOADERS = "dataloader=workers"
HANG = "trainer.hang_timeout=5"
DIED = "a loader worker died: process "


@dataclass(frozen=True)
class Ending:
    """One way to end.

    Attributes:
        arguments: of the recipe; ranks other than 1 are named in them.
        told: what the last lines say, after "rank 1 failed first: " or "the run failed: ".
        own: whether a line of the user's code is shown.
        code: of the command where it trains in its own process and is ended by a signal.
    """

    arguments: str
    told: str
    own: bool = True
    code: int = 1


TWO = (
    Ending("objective.ending=exit_0", "its process exited with 0 before the run", own=False),
    Ending(f"{HANG} objective.ending=hang_native", "it hangs: native code keeps the interpreter"),
    Ending("objective.ending=wordless", "Wordless: (its message cannot be read"),
    Ending("data.ending=stop_iteration", "the data set Samples raised StopIteration: no more"),
    Ending(f"{HANG} objective.ending=hang", "it hangs: no progress for"),
    Ending("objective.ending=abort", "its process was ended by SIGABRT"),
    Ending("objective.ending=native_overflow", "its process was ended by SIGSEGV"),
    Ending("objective.ending=memory", "MemoryError: too much"),
    Ending(f"data.ending=kill {LOADERS}", DIED, own=False),
    Ending(f"data.ending=segv {LOADERS}", DIED),
    Ending(f"data.ending=memory {LOADERS}", "MemoryError: too much (worker process "),
    Ending(f"{HANG} callbacks.small.stops=1", "it hangs: it ended training after", own=False),
)
ONE = (
    Ending("objective.ending=abort", "", code=-signal.SIGABRT),
    Ending("objective.ending=native_overflow", "", code=-signal.SIGSEGV),
    Ending("objective.ending=memory", "MemoryError: too much"),
    Ending(f"data.ending=kill {LOADERS}", DIED, own=False),
    Ending(f"data.ending=segv {LOADERS}", DIED),
)


def end(folder: Path, *arguments: str) -> tuple[int | None, str, list[int]]:
    """Return the exit code of a run, what it printed, and those of its processes that are left.

    One that hangs is killed; its code is None.
    """
    mark = secrets.token_hex(16)
    command = Command(python("-c", COMMAND, *RECIPE, *arguments), folder / "output", mark)
    code = command.code()
    wait_until(lambda: not marked(mark), 15.0)
    left = marked(mark)
    kill(mark)
    return code, command.printed(), left


def check(folder: Path, ending: Ending, who: str, *arguments: str) -> str:
    """Return standard error of a run that ends like `ending`, once that is as expected."""
    code, told, left = end(folder, *arguments, *ending.arguments.split())
    recursion = "RecursionError" in told  # from Python 3.12 on, the interpreter sees it coming
    assert code == (1 if recursion else ending.code), told
    assert left == []
    if ending.told and not recursion:
        assert f"{who}: {ending.told}" in told
    assert (OWN in told) == ending.own, told
    return told


@pytest.mark.slow
@pytest.mark.parametrize("ending", TWO, ids=lambda ending: ending.arguments)
def test_an_odd_ending_names_rank_and_cause(ending: Ending, tmp_path: Path) -> None:
    two = ("distributed=multi_cpu", "distributed.num_processes=2")
    told = check(tmp_path, ending, "rank 1 failed first", *two)
    if "stops" not in ending.arguments:  # the frames around a user's own say nothing to a person
        assert f"{ROOT / 'runner'}{os.sep}" not in told


@pytest.mark.slow
@pytest.mark.parametrize("ending", ONE, ids=lambda ending: ending.arguments)
def test_an_odd_ending_of_one_process_names_the_cause(ending: Ending, tmp_path: Path) -> None:
    part = ending.arguments.partition(".")[0]
    told = check(tmp_path, ending, "the run failed", f"{part}.on=0")
    assert "Traceback" not in told or OWN in told
