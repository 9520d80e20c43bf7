"""SIGKILL of any process of a sweep costs no job, and completes none twice (S1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import SECONDS, alive, python, started, wait_until
from tests.runner.sweep.kills import Outcome, killed_sweep
from tests.signals.cells import children

QUICK = (
    *("tracker.log_with=[]", "data.augment=false", "checkpoint.every_steps=5", "model.width=4"),
    *("trainer.epochs=null", "trainer.log_every=5"),
)


@pytest.mark.slow  # two starts of the command and of its server
def test_a_sweep_that_is_killed_goes_on(tmp_path: Path) -> None:
    line = ("seed=0,1,2", "sweep.jobs=2", "trainer.max_steps=40", *QUICK)
    ended = killed_sweep(line, tmp_path, kills=1, longest=1.0)
    ended.require_complete(3)


@pytest.mark.long
@pytest.mark.timeout(2400)  # minutes alone
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "where", [("sweep.jobs=2",), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")]
)
def test_twelve_jobs_two_at_once_killed_three_times(
    where: tuple[str, ...], seed: int, tmp_path: Path
) -> None:
    line = ("seed=0,1,2,3,4,5", "optimizer.lr=1e-3,1e-2", *where, "trainer.max_steps=120", *QUICK)
    ended = killed_sweep(line, tmp_path, kills=3, longest=8.0, seed=seed)
    ended.require_complete(12)


@pytest.mark.slow  # four starts of PyTorch
def test_two_commands_share_the_jobs_and_one_takes_over_from_the_other(tmp_path: Path) -> None:
    line = ("seed=0,1,2,3", "sweep.jobs=1", "trainer.max_steps=100", *QUICK)
    command = python("-m", "runner", "-m", *line)
    commands = [started(command, tmp_path, OMP_NUM_THREADS="1") for _ in range(2)]
    saved = "runs/*/sweep-*/0*/checkpoints/checkpoint_*"
    assert wait_until(lambda: len(list(tmp_path.glob(saved))) >= 2)
    below = children(commands[0].pid)
    commands[0].kill()
    output, _ = commands[1].communicate(timeout=SECONDS)
    commands[0].communicate()
    (folder,) = tmp_path.glob("runs/*/sweep-*")
    Outcome([], commands[1].returncode, output, folder).require_complete(4)
    assert not any(alive(pid) for pid in below)
