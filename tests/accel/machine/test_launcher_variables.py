"""Processes of mpirun and srun: placed by the launcher's variables, else refused (E1)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel import Accelerator, PartialState
from accel.machine import env as environment
from accel.machine import launcher_variables
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from runner.recipe import processes
from runner.recipe.schema import Distributed
from tests import slurm
from tests.helpers import ROOT, free_port, python

NOTHING = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_RANK": 1, "PMIX_NAMESPACE": "77"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": 1},
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
MPICH = {"PMI_SIZE": 2, "PMI_RANK": 1, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2, "PMI_JOBID": "j"}
STEP = {
    **{"SLURM_STEP_NUM_TASKS": 3, "SLURM_PROCID": 2, "SLURM_LOCALID": 0, "SLURM_NODEID": 1},
    **{"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "gpu[07-09]"},
    **{"SLURM_JOB_ID": 12, "SLURM_STEP_ID": 3, "SLURM_JOB_NODELIST": "cpu1,gpu[07-09]"},
}
# One srun task per node started Open MPI's daemons.
MPI_IN_SLURM = {
    **{**STEP, "SLURM_STEP_NUM_TASKS": 2, "SLURM_PROCID": 1, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    **{"OMPI_COMM_WORLD_SIZE": 8, "OMPI_COMM_WORLD_RANK": 5, "PMIX_NAMESPACE": "77"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_RANK": 1},
}
# Variables -> rank, local rank, world size, local world size, host of the rendezvous.
PLACED: list[tuple[dict[str, Any], tuple[object, ...]]] = [
    (OPEN_MPI, (1, 1, 2, 2, "127.0.0.1")),
    (MVAPICH, (1, 1, 2, 2, "127.0.0.1")),
    (MPICH, (1, 1, 2, 2, "127.0.0.1")),
    (STEP, (2, 0, 3, 1, "gpu07")),
    ({**STEP, "PMI_SIZE": 3, "PMI_RANK": 2, "PMIX_RANK": 2}, (2, 0, 3, 1, "gpu07")),
    (MPI_IN_SLURM, (5, 1, 8, 4, "cpu1")),
    ({**OPEN_MPI, "MASTER_ADDR": "10.0.0.7"}, (1, 1, 2, 2, "10.0.0.7")),
]
TWO_NODES = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": 4}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (TWO_NODES, "MASTER_ADDR"),
    ({"PMI_SIZE": 2, "PMI_RANK": 1}, "local rank, processes per node, MASTER_ADDR, MASTER_PORT"),
    ({"MV2_COMM_WORLD_SIZE": 2, "MV2_COMM_WORLD_RANK": 0}, "local rank"),
    ({"SLURM_STEP_NUM_TASKS": 2, "SLURM_PROCID": 0}, "local rank"),
    ({"OMPI_COMM_WORLD_SIZE": 2}, "rank"),
]
ALONE: list[dict[str, Any]] = [
    {"SLURM_NTASKS": 4, "SLURM_JOB_ID": 1},  # a script of sbatch, without srun
    {"SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 1, "PMI_SIZE": 1, "PMIX_RANK": 0},
    {"OMPI_COMM_WORLD_SIZE": 1},
    {"OMPI_COMM_WORLD_SIZE": 2, "WORLD_SIZE": 1},  # each is a run of its own
]
SCRIPT = """
import pathlib
import sys
import torch
from accel import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = accelerator.prepare(torch.nn.Linear(2, 1))
rank = torch.tensor([accelerator.process_index])
found = f"{accelerator.gather(rank).tolist()} {accelerator.local_process_index}"
# A launcher may join what its processes print in the middle of a line.
pathlib.Path(sys.argv[1], f"{accelerator.process_index}.txt").write_text(found)
accelerator.save_state(sys.argv[1] + "/state")
accelerator.end_training()
"""


@pytest.mark.parametrize(("variables", "placed"), PLACED)
def test_a_launcher_gives_rank_and_world_size(
    variables: dict[str, Any], placed: tuple[object, ...]
) -> None:
    with environment.patched(**{**NOTHING, **variables}):
        found = Environment.read()
        adopted = processes.adopted()
    address = (found.rank, found.local_rank, found.world_size, found.local_world_size)
    assert (*address, found.master_addr) == placed
    assert found.has_rendezvous
    assert found.unusable is None
    assert adopted == processes.Adopted(*address)  # type: ignore[arg-type]


def test_processes_of_one_job_agree_on_a_port_and_others_take_another() -> None:
    def port(**variables: object) -> tuple[int | None, str]:
        with environment.patched(**{**NOTHING, **OPEN_MPI, **variables}):
            found = Environment.read()
            return found.master_port, found.run_id

    assert port() == port(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_LOCAL_RANK=0)
    assert port()[0] != port(PMIX_NAMESPACE="78")[0]
    assert port()[1] != port(PMIX_NAMESPACE="78")[1]
    assert port(MASTER_PORT=4242)[0] == 4242
    with environment.patched(**{**NOTHING, **STEP, "SLURM_STEP_RESV_PORTS": "12001-12003"}):
        assert Environment.read().master_port == 12001


@pytest.mark.parametrize(("variables", "missing"), REFUSED)
@pytest.mark.parametrize("build", [Accelerator, PartialState])
def test_processes_that_cannot_join_each_other_are_refused(
    variables: dict[str, Any], missing: str, build: Any
) -> None:
    name = next(iter(variables))
    with environment.patched(**{**NOTHING, **variables}):
        with pytest.raises(ConfigError, match=rf"{name}.* WORLD_SIZE is not set") as refused:
            build(cpu=True)
        assert f"needs {missing}" in str(refused.value)
        assert "torchrun" in str(refused.value)
        with pytest.raises(ConfigError, match=name) as refused:
            processes.count(Distributed())
        assert "One task alone" in str(refused.value)


def test_an_address_by_hand_joins_several_nodes() -> None:
    place = {"MASTER_ADDR": "node0", "MASTER_PORT": 29500}
    with environment.patched(**{**NOTHING, **TWO_NODES, **place}):
        found = Environment.read()
    assert (found.rank, found.world_size, found.master_addr) == (1, 4, "node0")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu7", "gpu7"),
        ("a,b", "a"),
        ("rack[2-3]node[1-4]", "rack2node1"),
        ("n[1].cluster", "n1.cluster"),
        ("", None),
    ],
)
def test_the_first_host_of_slurms_notation(nodes: str, host: str | None) -> None:
    assert launcher_variables.first_host(nodes) == host


@pytest.mark.parametrize("variables", ALONE)
def test_one_task_goes_on(variables: dict[str, Any]) -> None:
    with environment.patched(**{**NOTHING, **variables}):
        assert Accelerator(cpu=True).num_processes == 1
        assert processes.adopted() is None


def started_by(command: list[str], folder: Path, **variables: str) -> list[str]:
    """Run the script with a launcher's command line; return what its ranks found."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    answer = subprocess.run(
        [*command, *python(str(script), str(folder))],
        **{"capture_output": True, "text": True, "timeout": 300, "cwd": folder},
        env={**os.environ, **path},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [path.read_text() for path in sorted(folder.glob("*.txt"))]


def saved_states(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]


@pytest.mark.slow  # it starts MPI and two processes that import PyTorch
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun (openmpi-bin) not installed")
def test_two_processes_of_mpirun_are_one_run(tmp_path: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    assert started_by(command, tmp_path) == ["[0, 1] 0", "[0, 1] 1"]
    assert saved_states(tmp_path) == ["state"]


@pytest.mark.slow  # a Slurm is started; mpirun's are not slow
@pytest.mark.slurm
def test_two_tasks_of_srun_are_one_run(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        with slurm.cluster(Path(folder)) as variables:
            command = ["srun", "--ntasks=2", "--overcommit"]
            assert started_by(command, tmp_path, **variables) == ["[0, 1] 0", "[0, 1] 1"]
    assert saved_states(tmp_path) == ["state"]


# -- one process of torchrun -------------------------------------------------------------------


def test_one_process_of_torchrun_has_a_group() -> None:
    """As under ``torchrun --nproc-per-node 1``; scripts call torch.distributed themselves."""
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with environment.patched(**told, **place):
        accelerator = Accelerator(cpu=True)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        total = torch.ones(2)
        dist.all_reduce(total)
        dist.barrier()
        assert total.tolist() == accelerator.gather(total).tolist() == [1.0, 1.0]
        assert accelerator.num_processes == 1
        model = torch.nn.Linear(1, 1)
        assert accelerator.prepare(model) is model
        accelerator.end_training()
        assert not dist.is_initialized()
