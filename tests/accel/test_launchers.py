"""Processes that another launcher started: refused where they would not know of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel import Accelerator, PartialState
from accel import env as environment
from accel.errors import ConfigError, StateError
from runner.config import processes
from runner.config.schema import Distributed
from tests.helpers import free_port, run_distributed

NOTHING = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
LAUNCHERS: list[dict[str, Any]] = [
    {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_RANK": 0},
    {"PMI_SIZE": 2, "PMI_RANK": 1},
    {"PMIX_RANK": 1},
    {"MV2_COMM_WORLD_SIZE": 2, "MV2_COMM_WORLD_RANK": 0},
    {"SLURM_STEP_NUM_TASKS": 2, "SLURM_PROCID": 0},
    {"SLURM_STEP_NUM_TASKS": 2, "PMI_SIZE": 2, "PMIX_RANK": 0},
]
ALONE: list[dict[str, Any]] = [
    {"SLURM_NTASKS": 4, "SLURM_JOB_ID": 1},  # a script of sbatch, without srun
    {"SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 1, "PMI_SIZE": 1, "PMIX_RANK": 0},
    {"OMPI_COMM_WORLD_SIZE": 1},
    {"OMPI_COMM_WORLD_SIZE": 2, "WORLD_SIZE": 1},  # each is a run of its own
]


@pytest.mark.parametrize("variables", LAUNCHERS, ids=lambda found: next(iter(found)))
@pytest.mark.parametrize("build", [Accelerator, PartialState])
def test_processes_that_know_nothing_of_each_other_are_refused(
    variables: dict[str, Any], build: Any
) -> None:
    name = next(iter(variables))
    with environment.patched(**{**NOTHING, **variables}):
        with pytest.raises(ConfigError, match=rf"{name}.*\n?.*WORLD_SIZE is not set") as refused:
            build(cpu=True)
        assert "torchrun" in str(refused.value)
        with pytest.raises(ConfigError, match=name) as refused:
            processes.count(Distributed())
        assert "Start one task" in str(refused.value)


@pytest.mark.parametrize("variables", ALONE)
def test_one_task_goes_on(variables: dict[str, Any]) -> None:
    with environment.patched(**{**NOTHING, **variables}):
        assert Accelerator(cpu=True).num_processes == 1
        assert processes.adopted() is None


def test_processes_of_torchrun_within_tasks_of_srun_go_on() -> None:
    told = {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "SLURM_STEP_NUM_TASKS": 2}
    with environment.patched(**{**NOTHING, **told}):
        assert environment.Environment.read().launched is None
        assert processes.count(Distributed()) == 4


def beside_a_group_of_the_scripts_own() -> str:
    """Build an engine where only the script's own process group knows of the others."""
    variables = environment.copy()
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    address = f"tcp://127.0.0.1:{variables['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    with environment.patched(**NOTHING), pytest.raises(StateError) as refused:
        Accelerator(cpu=True)
    return str(refused.value)


def test_a_process_group_that_the_environment_knows_nothing_of_is_refused() -> None:
    for message in run_distributed(beside_a_group_of_the_scripts_own, 2):
        assert "2 processes" in message
        assert "WORLD_SIZE=2" in message


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
