"""Threads per process: chosen once, written down, and kept where results must be bit-equal (R2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accel.machine import env
from runner.recipe.schema import Distributed, Recipe
from runner.runs import numerics
from runner.runs.job import Job


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(numerics, "cores", lambda: 4)
    with env.patched(OMP_NUM_THREADS=None):
        yield


def recipe(num_threads: int | None = None, deterministic: bool = False) -> Recipe:
    return Recipe(
        distributed=Distributed(kind="multi_cpu", num_threads=num_threads),
        deterministic=deterministic,
    )


@pytest.mark.parametrize(
    ("asked", "variable", "processes", "deterministic", "number"),
    [
        (None, None, 1, False, None),
        (None, None, 1, True, 4),
        (None, None, 2, False, 2),
        (None, None, 8, False, 1),
        (None, 3, 2, False, 3),
        (1, 3, 2, False, 1),
    ],
)
def test_choice(
    asked: int | None, variable: int | None, processes: int, deterministic: bool, number: int | None
) -> None:
    with env.patched(OMP_NUM_THREADS=variable):
        assert numerics.choose(recipe(asked, deterministic), processes) == number


def test_a_deterministic_run_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (Job(tmp_path).save(recipe()).place for _ in range(3))
    numerics.record_threads(first, recipe(deterministic=True), 2)
    monkeypatch.setattr(numerics, "cores", lambda: 16)
    numerics.record_threads(second, recipe(deterministic=True), 2)
    numerics.record_threads(third, recipe(), 2)
    found = [numerics.read(one).num_threads for one in (first, second, third)]
    assert found == [found[0], found[0], 8]
