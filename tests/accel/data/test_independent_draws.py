"""Samplers that draw from generators which others use, too."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
)

from accel import Accelerator
from accel.data.prepare import skip_first_batches
from accel.state import AcceleratorState
from tests.accel.data.parts import values
from tests.helpers import run_distributed

SHARED = torch.Generator()


class Wanted(Sampler[int]):
    """Draws each of 60 indices when it is wanted."""

    def __init__(self, draw: Callable[[int], int], generator: torch.Generator | None = None):
        self.draw = draw
        self.generator = generator

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        left = list(range(60))
        while left:
            yield left.pop(self.draw(len(left)))


def from_torch(limit: int) -> int:
    return int(torch.randint(limit, ()))


def from_shared(limit: int) -> int:
    return int(torch.randint(limit, (), generator=SHARED))


def from_numpy(limit: int) -> int:
    return int(np.random.randint(limit))


def own_generator() -> Callable[[int], int]:
    return random.Random(5).randrange


LAZY = {
    "python": lambda: Wanted(random.randrange),
    "torch": lambda: Wanted(from_torch),
    "numpy": lambda: Wanted(from_numpy),
    "shared": lambda: Wanted(from_shared, SHARED),
    "replacement": lambda: RandomSampler(
        range(60), replacement=True, num_samples=60, generator=SHARED
    ),
    "own": lambda: Wanted(own_generator()),
}


def lazily(kind: str, others_draw: bool, stop: int, folder: str) -> tuple[Any, Any]:
    """Return what is read after a save, straight and resumed, of a sampler that draws late."""

    def engine(seed: int) -> tuple[Accelerator, Any]:
        AcceleratorState._reset_state()
        for seeded in (random.seed, torch.manual_seed, np.random.seed, SHARED.manual_seed):
            seeded(seed)
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(range(60), batch_size=4, sampler=LAZY[kind]())
        return accelerator, accelerator.prepare(loader)

    def read(loader: Any, save: Callable[[], Any] | None = None) -> list[Any]:
        found = []
        for number, batch in enumerate(loader, start=1):
            found.append(batch.tolist())
            if others_draw:
                random.random(), torch.rand(2), np.random.rand(), from_shared(5)
            if save is not None and number == stop:
                save()
        return found

    accelerator, loader = engine(1)
    read(loader)
    straight = [read(loader, lambda: accelerator.save_state(folder))[stop:], read(loader)]
    accelerator, loader = engine(2)
    accelerator.load_state(folder)
    return straight, [read(skip_first_batches(loader, stop)), read(loader)]


@pytest.mark.parametrize("kind", [kind for kind in LAZY if kind != "own"])
def test_samplers_that_draw_late_are_resumed_in_their_order(kind: str, tmp_path: Path) -> None:
    for others_draw in (True, False):
        for stop in (1, 11):
            folder = str(tmp_path / f"{stop}{others_draw}")
            straight, resumed = lazily(kind, others_draw, stop, folder)
            assert straight == resumed


def test_a_sampler_draws_as_without_an_engine_where_nobody_else_does(tmp_path: Path) -> None:
    for kind in ("python", "shared", "replacement"):
        straight, _ = lazily(kind, False, 1, str(tmp_path / kind))
        random.seed(1)
        SHARED.manual_seed(1)
        plain = DataLoader(range(60), batch_size=4, sampler=LAZY[kind]())
        passes = [values(plain) for _ in range(3)]
        assert straight == [passes[1][1:], passes[2]]


@pytest.mark.parametrize("size", [1, 2])
def test_a_sampler_with_a_generator_of_its_own_is_told_at_the_resume(size, tmp_path) -> None:
    told = run_distributed(told_of_own, size, str(tmp_path / "state"))
    assert "sampler Wanted that does not draw again what it had drawn" in told[0]
    assert told[1:] == [""] * (size - 1)


def told_of_own(folder: str) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        lazily("own", False, 2, folder)
    told = [str(one.message) for one in found if "draw again" in str(one.message)]
    return "".join(told)
