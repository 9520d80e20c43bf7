"""Sweeps on Slurm: an array of jobs, each trained once, whatever is killed (S1, R3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import python, started
from tests.runner.slurm_runs import command, environment
from tests.runner.sweep.kills import Outcome, killed_sweep
from tests.runner.sweep.test_kills import QUICK
from tests.slurm import SECONDS, Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]
submitit = pytest.importorskip("submitit", reason="submitit is not installed (extra: submitit)")
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=60")
TWO_AT_ONCE = (*SLURM, "hydra.launcher.array_parallelism=2")


def outcome(folder: Path, code: int = 0, output: str = "") -> Outcome:
    return Outcome([], code, output, folder)


def test_a_sweep_is_an_array_of_jobs(slurm_cluster: Cluster, tmp_path: Path) -> None:
    line = ("seed=0,1,2", "trainer.max_steps=20", *QUICK, *TWO_AT_ONCE)
    answer = command(slurm_cluster, tmp_path, "-m", *line)
    (folder,) = tmp_path.glob("runs/digits/sweep-*")
    outcome(folder, answer.returncode, answer.stdout + answer.stderr).require_complete(3)
    names = {path.name for path in folder.glob(".submitit/*")}
    assert len({name.partition("_")[0] for name in names if name[0].isdigit()}) == 1
    wait_until(lambda: not slurm_cluster.jobs(), "no job is left")  # one that ends is listed


def test_jobs_of_a_sweep_on_two_nodes(slurm_cluster: Cluster, tmp_path: Path) -> None:
    wide = (*SLURM, "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1")
    line = ("seed=0,1", "trainer.max_steps=20", "distributed=multi_cpu", *QUICK, *wide)
    answer = command(slurm_cluster, tmp_path, "-m", *line)
    (folder,) = tmp_path.glob("runs/digits/sweep-*")
    outcome(folder, answer.returncode, answer.stdout + answer.stderr).require_complete(2)
    for job in ("0000", "0001"):
        assert "2 processes" in (folder / job / "run.log").read_text()


def test_a_partition_that_is_not_there(slurm_cluster: Cluster, tmp_path: Path) -> None:
    wrong = ("seed=0,1", *SLURM, "hydra.launcher.partition=nosuch")
    answer = command(slurm_cluster, tmp_path, "-m", "trainer.max_steps=2", *wrong)
    assert answer.returncode == 1
    assert "invalid partition" in answer.stderr
    wait_until(lambda: not slurm_cluster.jobs(), "no job is left")  # one that ends is listed


def test_a_command_that_is_stopped_stops_its_jobs(slurm_cluster: Cluster, tmp_path: Path) -> None:
    line = ("seed=0,1,2", "trainer.max_steps=100000", *QUICK, *TWO_AT_ONCE)
    sweep = started(python("-m", "runner", "-m", *line), tmp_path, **environment(slurm_cluster))
    wait_until(
        lambda: list(tmp_path.glob("runs/*/sweep-*/0*/checkpoints/checkpoint_*/manifest.json")),
        "no checkpoint",
    )
    sweep.terminate()
    output, _ = sweep.communicate(timeout=SECONDS)
    assert sweep.returncode == 75, output
    wait_until(lambda: not slurm_cluster.jobs(), "no job is left")  # one that ends is listed
    (folder,) = tmp_path.glob("runs/digits/sweep-*")
    ends = [code for job in range(2) for code in outcome(folder).ends(job)]
    assert 75 in ends
    assert 0 not in ends


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_twelve_jobs_two_at_once_killed_three_times(
    seed: int, slurm_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm_cluster.variables.items():
        monkeypatch.setenv(name, value)
    jobs = ("seed=0,1,2,3,4,5", "optimizer.lr=1e-3,1e-2", "trainer.max_steps=120")
    ended = killed_sweep(
        (*jobs, *QUICK, *TWO_AT_ONCE), tmp_path, kills=3, longest=8.0, seed=seed, command_only=True
    )
    ended.require_complete(12)
    wait_until(lambda: not slurm_cluster.jobs(), "no job is left")  # one that ends is listed
