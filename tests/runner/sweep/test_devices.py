"""GPUs and cores are given to the jobs of a sweep (S2)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.recipe import processes
from runner.recipe.schema import Distributed, Recipe
from runner.sweep.devices import THREADS, VISIBLE, Machine, Need


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.delenv(VISIBLE, raising=False)


def test_jobs_share_the_cores() -> None:
    machine = Machine(2, cores=8)
    first, second = machine.take(Need()), machine.take(Need(processes=2))
    assert first is not None
    assert second is not None
    assert (first.environment, second.environment) == ({THREADS: "4"}, {THREADS: "2"})
    assert machine.take(Need()) is None
    machine.give_back(first)
    assert machine.take(Need()) is not None


def test_as_many_jobs_as_cores_and_always_one() -> None:
    machine = Machine("auto", cores=5)
    taken = [machine.take(Need(threads=2)) for _ in range(3)]
    assert [share is not None for share in taken] == [True, True, False]
    assert Machine("auto", cores=2).take(Need(processes=8)) is not None


def test_each_job_has_its_own_gpus() -> None:
    machine = Machine("auto", ["4", "GPU-b", "7"], cores=12)
    first, second = machine.take(Need(2, gpus=2)), machine.take(Need(1, gpus=1))
    assert first is not None
    assert second is not None
    assert (first.gpus, second.gpus) == (("4", "GPU-b"), ("7",))
    assert first.environment[VISIBLE] == "4,GPU-b"
    assert first.environment[THREADS] == "4"  # 8 of 12 cores for 2 processes
    assert machine.take(Need(1, gpus=1)) is None
    machine.give_back(first)
    third = machine.take(Need(1, gpus=1))
    assert third is not None
    assert third.gpus == ("4",)


def test_more_jobs_than_gpus_share_the_least_used() -> None:
    machine = Machine(3, ["0", "1"], cores=6)
    shares = [machine.take(Need(1, gpus=1)) for _ in range(3)]
    assert [share.gpus for share in shares if share] == [("0",), ("1",), ("0",)]
    assert machine.take(Need()) is None


def test_a_job_on_the_cpu_sees_no_gpu() -> None:
    share = Machine(2, ["0"], cores=4).take(Need())
    assert share is not None
    assert share.environment[VISIBLE] == ""


def test_the_persons_threads_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "3")
    share = Machine(2, cores=8).take(Need())
    assert share is not None
    assert THREADS not in share.environment


def test_a_recipe_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Distributed(kind="multi_cpu", num_processes=2, num_threads=3)
    assert Need.of(replace(Recipe(), distributed=two)) == Need(2, 0, 3)
    monkeypatch.setattr(processes, "num_accelerators", lambda: 4)
    assert Need.of(Recipe()) == Need(1, 1)
    assert Need.of(replace(Recipe(), distributed=Distributed(device="cpu"))) == Need(1, 0)
    monkeypatch.setenv(VISIBLE, "2,3")
    assert Machine.here("auto").take(Need(2, gpus=2)) is not None
