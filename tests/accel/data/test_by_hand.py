"""The loader classes built by hand: each documented parameter does what it says (E1, E2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.data.samplers import BatchSamplerShard, SeedableRandomSampler
from accel.machine.errors import MissingPackageError
from accel.state import GradientState, PartialState
from tests.accel.data.parts import Counting, Moving, prepared, values
from tests.helpers import run_distributed

META = torch.device("meta")


def moves(kind: Any, **flags: Any) -> list[tuple[Any, bool]]:
    """Return how the loader `kind` moves its one batch."""
    batch = Moving()
    list(kind([0], collate_fn=lambda samples: {"id": torch.tensor(samples), "b": batch}, **flags))
    return batch.moves


def dispatched(n: int = 9, size: int = 4, index: int = 1, **flags: Any) -> DataLoaderDispatcher:
    """Return the second of two loaders over `n` numbers, all read in this process."""
    return DataLoaderDispatcher(
        range(n), batch_size=size, num_processes=2, process_index=index, **flags
    )


# -- DataLoaderShard -----------------------------------------------------------------------------


def test_a_shard_puts_batches_on_the_device() -> None:
    assert [b.device for b in DataLoaderShard(range(2), device=META)] == [META, META]
    assert next(iter(DataLoaderShard(range(2)))).device.type == "cpu"


def test_a_shard_copies_without_blocking() -> None:
    assert moves(DataLoaderShard, device=META, _non_blocking=True) == [(META, True)]
    assert moves(DataLoaderShard, device=META) == [(META, False)]
    assert moves(DataLoaderShard) == []


def test_a_shard_skips_and_takes_the_arguments_of_a_torch_loader() -> None:
    loader = DataLoaderShard(range(8), skip_batches=1, batch_size=3)
    assert (values(loader), len(loader)) == ([[3, 4, 5], [6, 7]], 2)


def test_a_shard_that_dropped_the_rest_has_no_remainder() -> None:
    for dropped, remainder in ((True, 0), (False, 1)):
        loader = DataLoaderShard(range(5), batch_size=2, _drop_last=dropped)
        found = [GradientState().remainder for _ in loader]
        assert found == [-1, -1, remainder]


def test_a_shard_keeps_its_mesh() -> None:
    mesh = object()
    loader = DataLoaderShard(range(5), torch_device_mesh=mesh)
    assert skip_first_batches(loader, 1).torch_device_mesh is mesh


def test_lengths_of_a_shard() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 3, False)
    loader = DataLoaderShard(range(10), batch_sampler=BatchSamplerShard(sampler, 2, 0))
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (6, 10, 2)


def test_a_shard_says_when_it_ends_and_what_remains() -> None:
    loader = prepared(5, 2, 2, 1)
    found = [(loader.end_of_dataloader, loader.remainder) for _ in loader]
    assert found == [(False, -1), (True, 1)]
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)


def test_a_shard_hands_on_the_epoch() -> None:
    dataset = Counting(4)
    sampler = SeedableRandomSampler(dataset, data_seed=0)
    loader = DataLoaderShard(dataset, sampler=sampler)
    loader.set_epoch(3)
    assert (dataset.epochs, sampler.epoch, loader.epoch) == ([3], 3, 3)


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_a_stateful_one_wants_torchdata(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda package: False)
    with pytest.raises(MissingPackageError, match="torchdata"):
        kind(range(4), use_stateful_dataloader=True)
    places = {DataLoaderShard: (None, None, None, 0), DataLoaderDispatcher: (False, 0)}
    with pytest.raises(MissingPackageError, match="torchdata"):
        kind(range(4), *places.get(kind, (0,)), True)
    assert len(kind(range(4))) == 4


def ordered(named: str) -> list[list[int]]:
    """Shuffle with generators that differ over the ranks."""
    state = PartialState(cpu=True)
    generator = torch.Generator().manual_seed(state.process_index)
    torch.manual_seed(state.process_index)
    own = generator if named == "generator" else None
    loader = DataLoaderShard(
        range(20),
        rng_types=[named],
        synchronized_generator=generator,
        sampler=RandomSampler(range(20), generator=own),
        batch_size=20,
    )
    return [batch.tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("named", ["torch", "generator"])
def test_shards_synchronise_the_named_generators(size: int, named: str) -> None:
    ranks = run_distributed(ordered, size, named)
    assert ranks == [ranks[0]] * size
    assert ranks[0][0] != ranks[0][1]


# -- DataLoaderDispatcher ------------------------------------------------------------------------


def test_a_dispatcher_deals_out_batches_or_splits_them() -> None:
    assert values(dispatched()) == [[4, 5, 6, 7], [0]]
    assert values(dispatched(split_batches=True)) == [[2, 3], [6, 7], [0]]


def test_a_dispatcher_skips_rounds() -> None:
    loader = dispatched(split_batches=True, skip_batches=2)
    assert (values(loader), len(loader)) == ([[0]], 1)


def test_a_dispatcher_drops_the_last_round() -> None:
    loader = dispatched(12, _drop_last=True)
    assert (values(loader), len(loader)) == ([[4, 5, 6, 7]], 1)
    assert values(dispatched(12)) == [[4, 5, 6, 7], [10, 11]]


def test_a_dispatcher_places_slices() -> None:
    assert moves(DataLoaderDispatcher, device=META, _non_blocking=True) == [(META, True)]
    assert moves(DataLoaderDispatcher, device=META) == [(META, False)]


def test_a_dispatcher_cuts_as_it_is_told() -> None:
    def cut(batch: torch.Tensor, part: slice, process_index: int, num_processes: int):
        return batch[process_index::num_processes]

    assert values(dispatched(8, slice_fn=cut)) == [[1, 3, 5, 7]]


def test_lengths_of_a_dispatcher() -> None:
    loader = dispatched()
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (8, 9, 2)
    found = [(loader.end_of_dataloader, loader.remainder) for _ in loader]
    assert found == [(False, -1), (True, 1)]


def test_a_dispatcher_hands_on_the_epoch() -> None:
    dataset = Counting(4)
    loader = DataLoaderDispatcher(dataset)
    loader.set_epoch(2)
    assert (dataset.epochs, loader.epoch) == ([2], 2)


# -- a mesh --------------------------------------------------------------------------------------


def read_on_a_mesh(shape: tuple[int, int]) -> list[list[list[int]]]:
    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    shard = prepare_data_loader(DataLoader(range(6), batch_size=2), torch_device_mesh=mesh)
    slices = DataLoaderDispatcher(range(6), batch_size=2, torch_device_mesh=mesh)
    return [values(shard), values(slices)]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_of_one_tensor_parallel_group_read_alike(size: int) -> None:
    everything = [[0, 1], [2, 3], [4, 5]]
    assert run_distributed(read_on_a_mesh, size, (1, size)) == [[everything] * 2] * size
    apart = run_distributed(read_on_a_mesh, size, (size, 1))
    assert len({str(found) for found in apart}) == size
