"""Streams that shuffle are resumed in mid-epoch, and between epochs, in the order of one pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed
from tests.helpers import run_distributed

SAMPLES = 24


def slow(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


class Numbers(IterableDataset[Any]):
    """Yields numbers in the order that a function draws; `buffered` ones are drawn one by one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind in ("own", "buffered"):
            self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        if self.kind == "buffered":
            buffer: list[int] = []
            for number in range(SAMPLES):
                buffer.append(number)
                if len(buffer) > 8:
                    yield buffer.pop(int(torch.randint(9, (), generator=self.generator)))
            yield from buffer
            return
        draws: dict[str, Callable[[], list[int]]] = {
            "own": lambda: torch.randperm(SAMPLES, generator=self.generator).tolist(),
            "torch": lambda: torch.randperm(SAMPLES).tolist(),
            "numpy": lambda: np.random.permutation(SAMPLES).tolist(),
            "python": lambda: random.sample(range(SAMPLES), SAMPLES),
        }
        yield from draws[self.kind]()


def prepared(kind: str, dispatch: bool | None, stateful: bool) -> tuple[Accelerator, Any]:
    set_seed(3)
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(DataLoader(Numbers(kind), batch_size=2))


def read(batches: Any) -> list[int]:
    """Return what is read, while a model draws, too."""
    found = []
    for batch in batches:
        found += batch.tolist()
        torch.rand(1), random.random(), np.random.rand()
    return found


def check(folder: str, kind: str, dispatch: bool | None, stateful: bool) -> list[str]:
    """Return what is wrong in three epochs that are resumed in the second and before the third."""
    accelerator, loader = prepared(kind, dispatch, stateful)
    first = read(loader)
    batches = iter(loader)
    begun = read(next(batches) for _ in range(2))
    accelerator.save_state(f"{folder}/within")
    rest = read(batches)
    accelerator.save_state(f"{folder}/between")
    third = read(loader)
    accelerator.free_memory()

    wrong = []
    accelerator, loader = prepared(kind, dispatch, stateful)
    accelerator.load_state(f"{folder}/within")
    resumed = read(loader if stateful else accelerator.skip_first_batches(loader, 2))
    if resumed != rest:
        wrong.append(f"within: {begun} and then {resumed}, not {rest}")
    accelerator.free_memory()
    accelerator, loader = prepared(kind, dispatch, stateful)
    accelerator.load_state(f"{folder}/between")
    resumed = read(loader)
    if resumed != third or third == first:
        wrong.append(f"between: {resumed}, not {third}, after {first}")
    accelerator.end_training()
    return wrong


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("kind", ["own", *slow("buffered", "torch", "numpy", "python")])
def test_a_shuffled_stream_goes_on(kind: str, stateful: bool, tmp_path: Path) -> None:
    assert check(str(tmp_path), kind, None, stateful) == []


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("kind", [*slow("own", "torch"), "buffered"])
def test_a_shuffled_stream_goes_on_two_processes(
    kind: str, dispatch: bool | None, stateful: bool, tmp_path: Path
) -> None:
    assert run_distributed(check, 2, str(tmp_path), kind, dispatch, stateful) == [[], []]
