"""GPUs and cores are given to the jobs of a sweep (S2)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.recipe import processes
from runner.recipe.schema import Distributed, Recipe
from runner.sweep.devices import THREADS, VISIBLE, Machine, Share


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.delenv(VISIBLE, raising=False)


def test_jobs_share_the_cores() -> None:
    machine = Machine(2, cores=8)
    first, second = machine.take(), machine.take(2)
    assert first is not None
    assert second is not None
    assert (first.environment, second.environment) == ({THREADS: "4"}, {THREADS: "2"})
    assert machine.take() is None
    machine.give_back(first)
    assert machine.take() is not None


def test_as_many_jobs_as_cores_and_always_one() -> None:
    machine = Machine("auto", cores=5)
    taken = [machine.take(threads=2) for _ in range(3)]
    assert [share is not None for share in taken] == [True, True, False]
    assert Machine("auto", cores=2).take(8) is not None


def test_each_job_has_its_own_gpus() -> None:
    machine = Machine("auto", ["4", "GPU-b", "7"], cores=12)
    first, second = machine.take(2, gpus=2), machine.take(1, gpus=1)
    assert first is not None
    assert second is not None
    assert (first.gpus, second.gpus) == (("4", "GPU-b"), ("7",))
    assert first.environment[VISIBLE] == "4,GPU-b"
    assert first.environment[THREADS] == "4"  # 8 of 12 cores for 2 processes
    assert machine.take(1, gpus=1) is None
    machine.give_back(first)
    third = machine.take(1, gpus=1)
    assert third is not None
    assert third.gpus == ("4",)


def test_more_jobs_than_gpus_share_the_least_used() -> None:
    machine = Machine(3, ["0", "1"], cores=6)
    shares = [machine.take(1, gpus=1) for _ in range(3)]
    assert [share.gpus for share in shares if share] == [("0",), ("1",), ("0",)]
    assert machine.take() is None


def test_a_job_on_the_cpu_sees_no_gpu() -> None:
    share = Machine(2, ["0"], cores=4).take()
    assert share is not None
    assert share.environment[VISIBLE] == ""


def test_the_persons_threads_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "3")
    share = Machine(2, cores=8).take()
    assert share is not None
    assert THREADS not in share.environment


def test_a_recipe_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(**distributed: object) -> Share:
        recipe = replace(Recipe(), distributed=Distributed(**distributed))
        found = Machine("auto", ["0", "1"], cores=8).share_of(recipe)
        assert found is not None
        return found

    assert share(kind="multi_cpu", num_processes=2, num_threads=3).cores == 6
    monkeypatch.setattr(processes, "num_accelerators", lambda: 2)
    assert share().gpus == ("0",)
    assert share(device="cpu").gpus == ()
    monkeypatch.setenv(VISIBLE, "2,3")
    both = Machine.here("auto").take(2, gpus=2)
    assert both is not None
    assert both.gpus == ("2", "3")
