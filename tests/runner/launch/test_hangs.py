"""R9: which rank hangs, judged from the places of all; the time-out, and threads in processes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.launch import hangs
from runner.launch.hangs import Row, judge
from runner.recipe.schema import Distributed, Recipe, Trainer
from tests.helpers import SECONDS, free_port, python, ran, started

SITE = "/venv/site-packages"
OWN = "/home/me/train.py"
ROW = Row(5, 5, "training", 9.0, "", waits=True, place=f"{OWN}:3 in main", stack="the stack\n")
BUSY = replace(ROW, waits=False, place="/home/me/data.py:12 in __getitem__")


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_that_does_not_wait_is_named_with_its_place(culprit: int) -> None:
    rows = {rank: BUSY if rank == culprit else ROW for rank in (0, 1)}
    found = judge(rows, set())
    told = "it hangs: no progress for 9 s in training, at /home/me/data.py:12 in __getitem__"
    assert (found.rank, found.message) == (culprit, told)
    stack, heading, first, second = found.traceback.splitlines()
    assert (stack, heading) == ("the stack", "rank  steps  phase: place")
    assert first.split() == [str(culprit), "5", "training:", *BUSY.place.split()]
    assert second.split() == [str(1 - culprit), "5", "training:", *ROW.place.split()]


def test_of_ranks_that_wait_the_one_behind_is_named() -> None:
    assert judge({0: ROW, 1: replace(ROW, count=4), 2: ROW}, set()).rank == 1


def test_a_rank_that_does_not_answer_is_named() -> None:
    found = judge({0: BUSY, 2: ROW}, {1})
    assert (found.rank, "it does not answer" in found.message) == (1, False)
    assert "its process does not answer" in found.message
    assert "does not answer" in found.traceback.splitlines()[1]


@pytest.mark.parametrize(
    ("ended", "world_size", "named", "what"),
    [
        ({1}, 2, 1, "it ended training"),
        ({0}, 2, 0, "it ended training"),
        ({2}, 4, 2, "it ended training"),
        ({0, 1, 3}, 4, 2, "it did not end training with the others"),
    ],
)
def test_a_rank_that_ends_training_alone_is_named(
    ended: set[int], world_size: int, named: int, what: str
) -> None:
    ending = "after step 2 (enough)"
    rows = {r: replace(ROW, ending=ending if r in ended else "") for r in range(world_size)}
    found = judge(rows, set())
    rule = f"{ending}; call loop.stop on every rank at the same step: no progress for"
    assert (found.rank, found.message.startswith(f"it hangs: {what} {rule}")) == (named, True)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([OWN], False),
        ([OWN, "<frozen importlib._bootstrap>", f"{SITE}/torch/distributed/x.py"], False),
        ([OWN, f"{SITE}/torch/utils/data/dataloader.py"], False),
        ([OWN, f"{SITE}/torch/autograd/graph.py"], True),
        ([OWN, f"{SITE}/torch/distributed/distributed_c10d.py"], True),
        ([OWN, f"{SITE}/deepspeed/runtime/engine.py"], True),
    ],
)
def test_what_waits(files: list[str], expected: bool) -> None:
    assert hangs.waits(files) is expected


def test_the_watchdog_comes_before_the_time_out_of_the_group() -> None:
    def limit(timeout: str | None, world_size: int = 2, of_group: timedelta | None = None) -> Any:
        recipe = Recipe(
            distributed=Distributed(kind="multi_cpu"), trainer=Trainer(hang_timeout=timeout)
        )
        recipe.distributed.init.timeout = of_group
        return hangs.limits_of(recipe, world_size)

    assert (limit("00:20:00"), limit(None)) == ((1200.0, 1200.0), None)
    assert limit("00:20:00", of_group=hangs.NCCL_TIMEOUT) == (540.0, 1200.0)
    assert limit("00:20:00", 1, hangs.NCCL_TIMEOUT) == (1200.0, 1200.0)
    with pytest.raises(ConfigError, match=r"Trainer\.hang_timeout='soon'"):
        Trainer(hang_timeout="soon")


# -- threads ---------------------------------------------------------------------------------------

# A process that hangs, told so, or keeps the interpreter: "native"; "start": before its first step.
HANGS = """
import ctypes, os, sys, time
from pathlib import Path
from runner.recipe.schema import Recipe, Trainer
from runner.launch import hangs
from runner.training.stopping import StopFlag
stop = StopFlag()
hangs.START_SECONDS = 1.0
recipe = Recipe(trainer=Trainer(hang_timeout=0.5))
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
with hangs.watching(recipe, Path(sys.argv[1]), stop, rank, size):
    if sys.argv[2] != "start":
        stop.progress.step()
    if sys.argv[2] == "native":
        ctypes.PyDLL(None).sleep(300)
    time.sleep(300 if sys.argv[2] in ("hang", "start") else 0)
"""


def hanging(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    return ran(python("-c", HANGS, str(folder), what), folder)


@pytest.mark.parametrize("what", ["hang", "start"])
def test_a_process_that_is_alone_is_ended_where_it_hangs(what: str, tmp_path: Path) -> None:
    ended = hanging(tmp_path, what)
    assert ended.returncode == 1
    assert 'File "<string>", line 1' in ended.stderr
    phase = "start-up" if what == "start" else "training"
    assert f"the run failed: it hangs: no progress for 1 s in {phase}, at" in ended.stderr
    cause = json.loads((tmp_path / "ended.json").read_text())["cause"]
    assert cause["message"].startswith("it hangs: no progress for")


def test_native_code_that_keeps_the_interpreter_ends_with_its_stack(tmp_path: Path) -> None:
    ended = hanging(tmp_path, "native")
    assert ended.returncode == 1
    assert "Timeout (0:00:10.800000)!" in ended.stderr
    assert 'File "<string>", line 1' in ended.stderr


def test_every_rank_writes_its_stack_and_all_end(tmp_path: Path) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = python("-c", HANGS, str(tmp_path), "hang")
    both = [
        started(line, tmp_path, **variables, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in (0, 1)
    ]
    told = "".join(one.communicate(timeout=SECONDS)[0] for one in both)
    assert [one.returncode for one in both] == [1, 1]
    assert told.count("failed first: it hangs: no progress for") == 1
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert f"watchdog of rank {rank}: no progress for" in log
        assert 'File "<string>", line' in log
