"""Workers that the command forks ahead: they get their orders, or end with the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from runner.launch import warm_workers
from runner.recipe.schema import Distributed, Recipe
from tests.helpers import alive, python

TWO = Recipe(distributed=Distributed(kind="multi_cpu", num_processes=2))
# A command with two workers that wait, each of which writes its order, and what it sees, to a file.
COMMAND = """
import json, os, signal, sys
from runner.launch import preload, warm_workers
from runner.launch.worker_group import Place, WorkerGroup
from tests.runner.launch.test_warm_workers import TWO

preload.RUN = ("json",)  # the order of things is the same without torch
warm_workers.allow()
folder, kill = sys.argv[1:]
order = {"path": ["/somewhere"], "folder": folder}
seen = '''
import json, os, sys
order = json.loads(sys.argv[1])
environment, path = dict(os.environ), sys.path
'''
write = '''
with open(os.path.join(order["folder"], environment["RANK"]), "w") as file:
    json.dump([environment["WORLD_SIZE"], "/somewhere" in path, os.getpid(), os.getppid()], file)
'''
try:
    with warm_workers.forked(TWO):
        waiting = warm_workers.take(2)
        pids = [worker.pid for worker in waiting]
        if kill == "one":
            os.kill(pids[0], signal.SIGKILL)
            os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
        elif kill == "command":
            print(*pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif kill == "refused":
            warm_workers._ahead.waiting = waiting
            print(*pids, flush=True)
            raise SystemExit(2)
        place = Place(2, 0, 2, 0, 1, "localhost", 1, "launch", {})
        line = [sys.executable, "-c", seen + write, json.dumps(order)]
        group = WorkerGroup(line, place, waiting=waiting)
        group.start()
        group.wait()
        group.close()
        print(group.failed, *pids)
except warm_workers.Began as began:
    order, environment, path = began.order, began.order["environment"], sys.path
    assert {signal.SIGTERM, signal.SIGINT} <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert os.getpgid(0) == os.getpid()
    exec(write)
"""


def command(folder: Path, kill: str = "") -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[3]
    return subprocess.run(
        python("-c", COMMAND, str(folder), kill),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_they_get_their_orders(tmp_path: Path) -> None:
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr
    failed, *pids = done.stdout.split()
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert failed == "{}"
    assert [(size, path, str(pid)) for size, path, pid, _ in found] == [
        ("2", True, pid) for pid in pids
    ]


def test_in_place_of_one_that_was_killed_comes_a_fresh_interpreter(tmp_path: Path) -> None:
    done = command(tmp_path, "one")
    assert done.returncode == 0, done.stderr
    failed, killed, other = done.stdout.split()
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert failed == "{}"
    assert str(found[0][2]) == other
    assert str(found[1][2]) not in (killed, other)


@pytest.mark.parametrize(("end", "code"), [("command", -signal.SIGKILL), ("refused", 2)])
def test_without_an_order_they_end_with_the_command(tmp_path: Path, end: str, code: int) -> None:
    done = command(tmp_path, end)
    assert done.returncode == code, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in pids if alive(pid)] == []
    assert list(tmp_path.iterdir()) == []


def test_a_function_of_a_program_forks_nothing() -> None:
    with warm_workers.forked(TWO):
        assert warm_workers.take(2) == []
