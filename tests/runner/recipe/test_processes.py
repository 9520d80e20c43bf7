"""How many processes a recipe asks for, and what contradicts the machine or the launcher (C1)."""

from __future__ import annotations

from typing import Any

import pytest

from accel.machine import env
from accel.machine.errors import ConfigError, MissingPackageError
from runner.recipe import processes
from runner.recipe.schema import Distributed

ALONE = {"RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None, "SLURM_STEP_NUM_TASKS": None}


@pytest.fixture(autouse=True)
def alone() -> Any:
    with env.patched(**ALONE):
        yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(processes, "num_accelerators", lambda: request.param)


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 1),
        ({"num_processes": 1}, 1),
        ({"kind": "multi_cpu"}, 2),
        ({"kind": "multi_cpu", "num_processes": 5}, 5),
    ],
)
def test_count_without_gpus(fields: dict[str, Any], number: int) -> None:
    assert processes.count(Distributed(**fields)) == number


@pytest.mark.parametrize("gpus", [4], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_one_process_per_gpu() -> None:
    assert processes.count(Distributed(kind="multi_gpu")) == 4
    assert processes.count(Distributed(kind="multi_gpu", num_processes=3)) == 3


@pytest.mark.parametrize(
    ("gpus", "fields", "words"),
    [
        (0, {"kind": "multi_gpu"}, ["distributed=multi_gpu", "no GPU", "distributed=multi_cpu"]),
        (2, {"kind": "multi_gpu", "num_processes": 4}, ["num_processes=4", "has 2"]),
        (2, {"kind": "multi_gpu", "device": "cpu"}, ["device=cpu", "distributed=multi_cpu"]),
        (2, {"kind": "multi_cpu", "device": "cuda"}, ["device=cuda", "distributed=multi_gpu"]),
        (2, {"num_processes": 2}, ["num_processes=2", "is one process", "multi_cpu"]),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_contradictions(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        processes.count(Distributed(**fields))
    for word in words:
        assert word in str(refused.value)


def test_processes_of_torchrun_are_adopted() -> None:
    with env.patched(RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2):
        assert processes.adopted() == processes.Adopted(1, 1, 2, 2)
        assert processes.count(Distributed()) == 2
        with pytest.raises(ConfigError, match="the launcher has started 2 processes"):
            processes.count(Distributed(kind="multi_cpu", num_processes=4))


def test_tasks_of_srun_that_cannot_join_each_other_are_refused() -> None:
    with env.patched(SLURM_STEP_NUM_TASKS=4):
        with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS=4"):
            processes.adopted()


def test_a_recipe_is_checked_for_another_machine() -> None:
    distributed = Distributed(kind="multi_gpu", num_processes=8)
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4}
    with processes.accelerators_expected(4):
        assert processes.num_accelerators() == 4
        with pytest.raises(ConfigError, match="this machine has 4"):
            processes.count(distributed)
        with env.patched(**place):  # two nodes
            assert processes.count(distributed) == 8
    with processes.accelerators_expected(0), pytest.raises(ConfigError, match="finds no GPU"):
        processes.count(distributed)


# -- in a Ray cluster ----------------------------------------------------------------------


def test_processes_in_a_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "is_available", lambda name: True)
    three = Distributed(kind="ray", num_processes=3)
    assert processes.count(three) == 3
    with pytest.raises(ConfigError, match=r"Give distributed\.num_processes=4"):
        processes.count(Distributed(kind="ray"))
    with env.patched(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0"):
        with pytest.raises(ConfigError, match="distributed=ray on processes of a launcher"):
            processes.count(three)
    monkeypatch.setattr(processes, "is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match=r"accel-runner\[ray\]"):
        processes.count(three)


def test_restarts_of_torchrun_would_begin_another_run() -> None:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2}
    for restarts in (None, "0"):
        with env.patched(**place, TORCHELASTIC_MAX_RESTARTS=restarts):
            assert not processes.restarts_of_new_runs()
    with env.patched(**place, TORCHELASTIC_MAX_RESTARTS=2):
        (problem,) = processes.restarts_of_new_runs()
    assert "--max-restarts=2" in str(problem)
    assert "resume=auto" in str(problem)
