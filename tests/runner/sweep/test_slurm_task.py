"""A job of a sweep in a job of Slurm's: requeued, preempted or out of time, in one directory.

Holds S1, R3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import python, started
from tests.runner.slurm_runs import environment, trained_here, weights
from tests.runner.sweep.kills import Outcome
from tests.runner.sweep.test_kills import QUICK
from tests.slurm import SECONDS, Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]
submitit = pytest.importorskip("submitit", reason="submitit is not installed (extra: submitit)")
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=60")
WIDE = ("hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1", "distributed=multi_cpu")
RECIPE = (
    *(one for one in QUICK if not one.startswith("checkpoint.every_steps")),
    *("trainer.max_steps=2000", "checkpoint.every_steps=100", "checkpoint.every_epochs=null"),
    *("trainer.eval_every=1000", "deterministic=true", "distributed.num_threads=1"),
)


@contextmanager
def sweep_of_one(cluster: Cluster, cwd: Path, *line: str) -> Iterator[tuple[str, Path]]:
    """Run a sweep of one job; yield that of Slurm and the run directory once it has a state."""
    command = python("-m", "runner", "-m", *RECIPE, "seed=3", "sweep.dir=sweep", *SLURM, *line)
    sweep = started(command, cwd, **environment(cluster))
    run_dir = cwd / "sweep" / "0000"
    try:
        wait_until(lambda: list(run_dir.glob("checkpoints/checkpoint_*/manifest.json")), "no state")
        (running,) = cluster.jobs()
        yield running, run_dir
        output, _ = sweep.communicate(timeout=2 * SECONDS)
    finally:
        sweep.kill()
        sweep.communicate()
    assert sweep.returncode == 0, output
    wait_until(lambda: cluster.jobs() == [], "a job is queued still")
    assert [one.name for one in (cwd / "sweep").glob("0*")] == ["0000"]
    assert Outcome([], 0, output, cwd / "sweep").ends(0) == [75, 0]


def of_one_machine(line: tuple[str, ...]) -> list[str]:
    return [one for one in line if not one.startswith("hydra")]


@pytest.mark.parametrize("where", [pytest.param((), marks=pytest.mark.long), WIDE])
def test_a_requeued_job_goes_on_in_its_directory(
    where: tuple[str, ...], slurm_cluster: Cluster, tmp_path: Path
) -> None:
    with sweep_of_one(slurm_cluster, tmp_path, *where) as (job_id, run_dir):
        slurm_cluster.ask("scontrol", "requeue", job_id)
    here = trained_here(slurm_cluster, tmp_path, *RECIPE, "seed=3", *of_one_machine(where))
    assert weights(run_dir) == weights(here)


def test_a_preempted_job_goes_on_in_its_directory(slurm_cluster: Cluster, tmp_path: Path) -> None:
    low = ("hydra.launcher.partition=low", "+hydra.launcher.additional_parameters.exclusive=''")
    with sweep_of_one(slurm_cluster, tmp_path, *low):
        urgent = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive"]
        slurm_cluster.ask(*urgent, f"--output={tmp_path / 'urgent'}", "--wrap=sleep 3")


@pytest.mark.parametrize("where", [(), WIDE])
def test_the_warning_before_the_time_limit_saves_and_queues_again(
    where: tuple[str, ...], slurm_cluster: Cluster, tmp_path: Path
) -> None:
    again = "hydra.launcher.max_num_timeout=1"
    with sweep_of_one(slurm_cluster, tmp_path, again, *where) as (job_id, _):
        slurm_cluster.ask("scancel", "--signal=USR2", job_id)
