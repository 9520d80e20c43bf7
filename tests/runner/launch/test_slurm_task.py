"""The processes of a submitted run: what the signal before the time limit does (R3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.slurm_runs import (
    LONG,
    log,
    submitted,
    trained_here,
    wait_for_checkpoint,
    wait_for_end,
    weights,
)
from tests.slurm import SECONDS, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_signal_before_the_time_limit_saves_and_queues_again(
    slurm_cluster: Cluster, tmp_path: Path
) -> None:
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *LONG)
    wait_for_checkpoint(run_dir)
    slurm_cluster.ask("scancel", "--signal=USR1", job_id)  # as --signal=USR1@… does
    wait_for_end(slurm_cluster, job_id, run_dir)
    assert "SIGUSR1 received" in log(run_dir)
    assert "resumed" in log(run_dir)
    assert weights(run_dir) == weights(trained_here(slurm_cluster, tmp_path, *LONG))


def test_a_limit_of_slurms_own_is_met(slurm_cluster: Cluster, tmp_path: Path) -> None:
    """Slurm counts limits in minutes: the run is stopped once, and goes on."""
    limit = ("submit.time=00:01:02", "submit.signal_delay_s=1", "trainer.max_steps=null")
    endless = [*(one for one in LONG if "max_steps" not in one), "trainer.epochs=100000"]
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *endless, *limit)
    slurm_cluster.wait_for(job_id, "PENDING", seconds=2 * SECONDS)
    slurm_cluster.wait_for(job_id, "RUNNING")
    assert "SIGUSR1 received" in log(run_dir)
    slurm_cluster.ask("scancel", job_id)
    slurm_cluster.wait_for(job_id, "CANCELLED")


def test_a_run_that_is_finished_ends_at_once(slurm_cluster: Cluster, tmp_path: Path) -> None:
    line = [*(one for one in LONG if "max_steps" not in one), "trainer.max_steps=2"]
    job_id, run_dir = submitted(slurm_cluster, tmp_path, *line)
    wait_for_end(slurm_cluster, job_id, run_dir)
    slurm_cluster.ask("scontrol", "requeue", job_id)
    wait_for_end(slurm_cluster, job_id, run_dir)
    assert "Nothing is left to do" in log(run_dir)
