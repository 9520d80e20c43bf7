"""R1: random draws and orders are functions of (seed, epoch, index)."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from accel.data.samplers import SeedableRandomSampler
from runner.data import datasets
from runner.data.datasets import (
    Collate,
    DataError,
    ReplayedRandomSampler,
    SeededDataset,
    SeededStream,
    UserCode,
    WindowSampler,
    make_loader,
    make_order,
)
from runner.recipe.schema import DataLoader


class Drawing(Dataset):
    """Draws from three generators; notes the epochs that it is told."""

    def __init__(self, length: int = 12) -> None:
        self.length = length
        self.epoch = -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        return torch.tensor([index, self.epoch, *draws], dtype=torch.float64)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class DrawingStream(IterableDataset):
    def __iter__(self):
        for number in range(6):
            yield torch.tensor([number, random.random(), float(np.random.rand()), torch.rand(1)])


def states() -> list:
    _, key, *rest = np.random.get_state()
    return [random.getstate(), key.tolist(), rest, torch.get_rng_state().tolist()]


def test_draws_are_a_function_of_seed_epoch_and_index() -> None:
    dataset = SeededDataset(Drawing(), seed=3)
    one = dataset[2, 5]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    assert torch.equal(SeededDataset(Drawing(), seed=3)[2, 5], one)
    others = [dataset[2, 4], dataset[1, 5], SeededDataset(Drawing(), seed=4)[2, 5]]
    for draw in range(2, 5):
        assert len({sample[draw].item() for sample in [one, *others]}) == 4
    assert torch.equal(dataset[5], dataset[0, 5])


@pytest.mark.parametrize("normals", [0, 1, 2])  # NumPy draws two of them at a time
def test_reading_leaves_the_training_generators_alone(normals: int) -> None:
    np.random.seed(0)
    np.random.standard_normal(normals)
    before = states()
    SeededDataset(Drawing(), seed=0).__getitems__([(0, 1), (0, 2)])
    list(SeededStream(DrawingStream(), seed=0))
    assert states() == before

    class Broken(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        SeededDataset(Broken(), seed=0)[0, 1]
    assert states() == before


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_are_the_same_with_and_without_workers(persistent: bool) -> None:
    def epochs(**fields) -> list[torch.Tensor]:
        order = SeedableRandomSampler(range(12), data_seed=0)
        sampler = WindowSampler(order, 4, 4, 3)
        loader = make_loader(
            SeededDataset(Drawing(), seed=1), DataLoader(**fields), "cpu", batch_sampler=sampler
        )
        found = []
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            found.append(torch.cat(list(loader)))
        return found

    alone = epochs()
    shared = epochs(num_workers=2, persistent_workers=persistent)
    for one, other, epoch in zip(alone, shared, (0, 1, 5), strict=True):
        assert torch.equal(one, other)
        assert set(one[:, 1].tolist()) == {epoch}
    assert not torch.equal(alone[0].sort(0).values, alone[1].sort(0).values)


def test_a_stream_draws_by_position_and_skips() -> None:
    stream = SeededStream(DrawingStream(), seed=1)
    everything = torch.stack(list(stream))
    stream.skip = 4
    assert torch.equal(torch.stack(list(stream)), everything[4:])
    stream.skip = 0
    stream.set_epoch(1)
    assert not torch.equal(torch.stack(list(stream)), everything)
    loader = make_loader(stream, DataLoader(num_workers=1), "cpu", batch_size=6)
    stream.set_epoch(0)
    assert torch.equal(next(iter(loader)), everything)


def test_making_iterators_leaves_the_training_generator_alone() -> None:
    loader = make_loader(
        SeededDataset(Drawing(), 0),
        DataLoader(num_workers=2),
        "cpu",
        batch_sampler=WindowSampler(SeedableRandomSampler(range(12)), 4, 4, 3),
    )
    before = states()
    assert len(list(loader)) == 3
    assert states() == before


# -- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seedable", [True, False])
def test_orders_are_functions_of_seed_and_epoch(seedable: bool) -> None:
    def order(epoch: int, seed: int = 0, **fields) -> list[int]:
        sampler = make_order(range(30), seed, DataLoader(use_seedable_sampler=seedable, **fields))
        assert isinstance(sampler, SeedableRandomSampler) == seedable
        sampler.set_epoch(epoch)
        return list(sampler)

    assert sorted(order(0)) == list(range(30))
    assert order(3) == order(3)
    assert len({tuple(order(epoch)) for epoch in range(4)}) == 4
    assert order(0) != order(0, seed=1)
    assert order(2, data_seed=5) == order(2, seed=9, data_seed=5)


def test_the_replayed_order_is_that_of_torchs_own_sampler() -> None:
    sampler = ReplayedRandomSampler(range(20), seed=4)
    plain = torch.utils.data.RandomSampler(range(20), generator=torch.Generator().manual_seed(4))
    wanted = [list(plain) for _ in range(3)]
    sampler.set_epoch(2)
    assert list(sampler) == wanted[2]
    assert list(pickle.loads(pickle.dumps(sampler))) == wanted[2]


def test_an_exit_in_a_worker_is_an_error_that_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit), UserCode("__getitem__"):
        raise SystemExit(3)
    monkeypatch.setattr(datasets, "get_worker_info", lambda: "a worker")
    with pytest.raises(DataError, match="__getitem__ raised SystemExit: 3"):
        with UserCode("__getitem__"):
            raise SystemExit(3)
    with pytest.raises(KeyError), UserCode("__getitem__"):
        raise KeyError(3)


@pytest.mark.parametrize(
    "samples",
    [[torch.ones(2), torch.ones(3)], [{"a": 1}, {"b": 1}], [(1, 2), (1,)], [object(), object()]],
)
def test_samples_that_do_not_agree_are_refused(samples: list[Any]) -> None:
    with pytest.raises(DataError, match="samples cannot be collated"):
        Collate(None)(samples)
