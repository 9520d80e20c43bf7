"""SIGKILL of any process of a sweep costs no job, and completes none twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.sweep.kills import killed_sweep

QUICK = (
    *("tracker.log_with=[]", "data.augment=false", "checkpoint.every_steps=5", "model.width=4"),
    *("trainer.epochs=null", "trainer.log_every=5"),
)


def test_a_sweep_that_is_killed_goes_on(tmp_path: Path) -> None:
    line = ("seed=0,1,2", "sweep.jobs=2", "trainer.max_steps=40", *QUICK)
    ended = killed_sweep(line, tmp_path, kills=1, longest=1.0)
    ended.require_complete(3)


@pytest.mark.slow
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
