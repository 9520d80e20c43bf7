"""A sweep that is killed again and again, and started again: each job is completed exactly once."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import SECONDS, alive, python, ran, wait_until
from tests.signals.cells import children
from tests.signals.oracle import Command
from tests.signals.oracle import command as command_of

# A start took 21 s at a load of 3 on two cores; with `nice` and others beside it, minutes.
START_SECONDS = 2 * SECONDS
END_SECONDS = 120.0
IDLE_SECONDS = 400.0  # joblib's own workers wait five minutes for a job, and then end


@dataclass
class Outcome:
    """What a sweep looks like after the kills, and after it was started once more."""

    killed: list[str]
    code: int
    output: str
    folder: Path

    def ends(self, job: int) -> list[int | None]:
        """Return the exit code of each session of a job; None: it was killed."""
        found = sorted((self.folder / f"{job:04}" / "sessions").glob("*/job.json"))
        files = [file.with_name("ended.json") for file in found]
        return [json.loads(file.read_text())["code"] if file.exists() else None for file in files]

    def require_complete(self, num_jobs: int) -> None:
        """Assert that each job was completed exactly once, in one directory, with a full table."""
        assert self.code == 0, self.output
        names = sorted(path.name for path in self.folder.glob("[0-9]*"))
        assert names == [f"{job:04}" for job in range(num_jobs)]
        for job, name in enumerate(names):
            ends = self.ends(job)
            assert (ends.count(0), ends[-1]) == (1, 0), (name, ends, self.killed)
            summary = json.loads((self.folder / name / "summary.json").read_text())
            assert summary["complete"] is True
            steps = _train_steps(self.folder / name / "metrics.jsonl")
            assert steps == sorted(set(steps)), (name, steps)  # none twice, none lost
            assert steps[-1] == summary["step"]
        with (self.folder / "results.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["status"] for row in rows] == ["finished"] * num_jobs
        assert all(float(row["objective"]) > 0 for row in rows)


def _train_steps(path: Path) -> list[int]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["step"] for record in records if record["split"] == "train"]


def killed_sweep(
    line: Sequence[str],
    cwd: Path,
    kills: int,
    longest: float,
    seed: int = 0,
    command_only: bool = False,
) -> Outcome:
    """Start a sweep, kill a process of it at a random time, `kills` times; start it once more.

    Args:
        line: the command line behind ``runner -m``.
        cwd: where it is given.
        kills: how often it is killed: the command itself, or any process below it.
        longest: seconds from the start of a job to the latest kill.
        seed: of times and victims.
        command_only: whether only the command itself is killed; its jobs run elsewhere.
    """
    draw = random.Random(seed)
    command = python("-m", "runner", "-m", *line)
    killed = []
    for number in range(kills):
        before = _num_started(cwd)
        started = Command(command, cwd / f"command_{number}.log", "", session=True)
        sweep = started.process
        begun = lambda n=before, s=sweep: _num_started(cwd) != n or s.poll() is not None  # noqa: E731
        assert wait_until(begun, START_SECONDS), started.printed()
        time.sleep(draw.uniform(0.0, longest))
        below = children(sweep.pid)
        always = command_only or number % 2 == 0
        victim = sweep.pid if always else draw.choice([sweep.pid, *below])
        killed.append("parent" if victim == sweep.pid else f"{below.index(victim)} of {below}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        sweep.wait(START_SECONDS)
        if victim == sweep.pid and not command_only:
            within = IDLE_SECONDS if any("joblib" in word for word in line) else END_SECONDS
            left = lambda pids=below: list(filter(alive, pids))  # noqa: E731
            assert wait_until(lambda left=left: not left(), within), [*map(command_of, left())]
    ended = ran(command, cwd, 900, OMP_NUM_THREADS="1")
    (folder,) = [path.parent for path in cwd.glob("runs/*/sweep-*/sweep.json")]
    return Outcome(killed, ended.returncode, ended.stdout + ended.stderr, folder)


def _num_started(cwd: Path) -> int:
    return len(list(cwd.glob("runs/*/sweep-*/[0-9]*/sessions/*/job.json")))
