"""R9: the time-out of the watchdog, and its threads in two real processes."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.launch import hangs, watchdog
from runner.recipe.schema import Distributed, Recipe, Trainer
from runner.training.stopping import Progress
from tests.helpers import SECONDS, python, run_distributed

# -- the time-out ----------------------------------------------------------------------------------


def test_the_watchdog_comes_before_the_time_out_of_the_group() -> None:
    cpu = Distributed(kind="multi_cpu")
    assert watchdog.limit_of(Recipe(distributed=cpu)) == 1200.0
    assert watchdog.limit_of(Recipe(distributed=cpu, trainer=Trainer(hang_timeout=None))) is None
    assert (
        watchdog.limit_of(Recipe(distributed=cpu, trainer=Trainer(hang_timeout="00:01:00"))) == 60
    )
    short = Distributed(kind="multi_cpu")
    short.init.timeout = watchdog.NCCL_TIMEOUT
    assert watchdog.limit_of(Recipe(distributed=short)) == 540.0
    with pytest.raises(ConfigError, match=r"Trainer\.hang_timeout='soon'"):
        Trainer(hang_timeout="soon")


# -- threads ---------------------------------------------------------------------------------------


def watched(folder: str, limit: float) -> list[tuple[int, str, bool]]:
    """Return this rank's verdicts: rank 1 sleeps until there is one, then both make a step."""
    from accel.machine.env import Environment
    from runner.launch import torchrun

    rank, verdicts = Environment.read().rank or 0, []
    progress = Progress()
    store = torchrun.connect("watchdog", watchdog.STORE_TIMEOUT)
    # A connection that waits serves no other thread.
    meet, news = torchrun.connect("meet"), torchrun.connect("meet")

    def tell(verdict: hangs.Verdict | None) -> None:
        verdicts.append((-1, "", False) if verdict is None else _short(verdict))
        news.set("told", "1")

    dog = watchdog.Watchdog(progress, limit, rank, 2, Path(folder), store, tell)
    dog.start()
    try:
        if rank == 1:
            sleeping(meet)
            meet.set("awake", "1")
        meet.wait(["awake"], watchdog.NCCL_TIMEOUT)
        progress.step()
        deadline = time.monotonic() + 120
        while verdicts and verdicts[-1][0] >= 0 and time.monotonic() < deadline:
            time.sleep(0.02)  # the judge is about to see the step
    finally:
        dog.close()
    return verdicts


def _short(verdict: hangs.Verdict) -> tuple[int, str, bool]:
    return verdict.rank, verdict.message, verdict.ends


def sleeping(meet: Any) -> None:
    deadline = time.monotonic() + 120
    while not meet.check(["told"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# A process that hangs, told so, or keeps the interpreter: "native".
HANGS = """
import ctypes, sys, time
from pathlib import Path
from runner.recipe.schema import Recipe, Trainer
from runner.launch import watchdog
from runner.training.stopping import StopFlag
stop = StopFlag()
recipe = Recipe(trainer=Trainer(hang_timeout=0.5))
with watchdog.watching(recipe, Path(sys.argv[1]), stop, 0, 1):
    stop.progress.step()
    if sys.argv[2] == "native":
        ctypes.PyDLL(None).sleep(300)
    time.sleep(300 if sys.argv[2] == "hang" else 0)
"""


def told(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    line = python("-c", HANGS, str(folder), what)
    return subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)


def test_a_process_that_is_alone_is_ended_where_it_hangs(tmp_path: Path) -> None:
    ended = told(tmp_path, "hang")
    assert ended.returncode == 1
    assert 'File "<string>", line 1' in ended.stderr
    assert "the run failed: it hangs: no progress for" in ended.stderr
    cause = json.loads((tmp_path / "ended.json").read_text())["cause"]
    assert cause["message"].startswith("it hangs: no progress for")


def test_native_code_that_keeps_the_interpreter_ends_with_its_stack(tmp_path: Path) -> None:
    ended = told(tmp_path, "native")
    assert ended.returncode == 1
    assert "Timeout (0:00:10.800000)!" in ended.stderr
    assert 'File "<string>", line 1' in ended.stderr


def test_a_process_that_is_alone_and_ends_leaves_no_log(tmp_path: Path) -> None:
    ended = told(tmp_path, "not at all")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list((tmp_path / "logs").iterdir()) == []


def test_every_rank_writes_its_stack_and_one_is_named(tmp_path: Path) -> None:
    answers = run_distributed(watched, 2, str(tmp_path), 0.5)
    (verdicts,) = (answer for answer in answers if answer)
    assert verdicts[-1][0] == -1  # progress was made again
    for rank, message, ends in verdicts[:-1]:
        assert rank in (0, 1)
        assert "no progress for" in message
        assert not ends
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert f"watchdog of rank {rank}: No progress for" in log
        assert "in watched" in log
    assert "in sleeping" in (tmp_path / "logs" / "rank_1.log").read_text()
