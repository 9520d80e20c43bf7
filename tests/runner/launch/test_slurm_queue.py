"""Jobs of Slurm, as its commands show them (R3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine import env
from accel.machine.errors import StateError
from runner.launch import slurm
from tests.slurm import Cluster, wait_until


@pytest.mark.slurm
def test_jobs_in_the_queue(slurm_cluster: Cluster, tmp_path: Path) -> None:
    submit = ["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 60"]
    array = slurm_cluster.ask(*submit, "--array=0-2", "--hold")
    one = slurm_cluster.ask(*submit)
    slurm_cluster.wait_for(one, "RUNNING")
    with env.patched(**slurm_cluster.variables, SLURM_JOB_ID=one):
        found = slurm.queue()
        held = {f"{array}_{index}": "PENDING" for index in range(3)}
        assert found == {**held, one: "RUNNING"}
        assert slurm.field("JobState") == "RUNNING"
        assert slurm.field("PreemptTime") == "None"
        slurm.cancel(*found, state=slurm.PENDING)
        wait_until(lambda: slurm.queue() == {one: "RUNNING"}, "they are still there")
        slurm.requeue()
        wait_until(lambda: slurm.queue() != {one: "RUNNING"}, "it was not requeued")
        slurm.cancel(one)
        wait_until(lambda: slurm.queue() == {}, "it is still there")
        slurm.cancel()
    with env.patched(SLURM_CONF=str(tmp_path)), pytest.raises(StateError, match="squeue"):
        slurm.queue()
