"""E1, E2: preparing a loader, its documented settings, and skipping first batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from accel import Accelerator, DataLoaderConfiguration
from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.data.samplers import SeedableRandomSampler
from accel.machine.errors import ConfigError, MissingPackageError
from tests.accel.data.parts import Counting, Moving, Stream, prepared, values
from tests.helpers import run_distributed

# -- skipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_skipping_map_data_fetches_nothing(count: int, split: bool, dispatch: bool) -> None:
    dataset = Counting(23)
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=4, shuffle=True),
        num_processes=count,
        process_index=count - 1,
        split_batches=split,
        dispatch_batches=dispatch,
        use_seedable_sampler=True,
    )
    everything = values(loader)
    loader.set_epoch(0)
    dataset.fetched.clear()
    skipping = skip_first_batches(loader, 2)
    left = []
    for batch in skipping:
        left.append(batch.tolist())
        end, remainder = skipping.end_of_dataloader, skipping.remainder
    assert left == everything[2:]
    assert len(skipping) == len(left)
    assert not set(dataset.fetched) & {i for batch in everything[:2] for i in batch}
    assert (end, remainder) == (True, 23 % loader.total_batch_size)
    assert type(skipping) is type(loader)


@pytest.mark.parametrize("dispatch", [False, True])
def test_skipping_a_stream(dispatch: bool) -> None:
    loader = prepare_data_loader(
        DataLoader(Stream(11), batch_size=2),
        num_processes=2,
        process_index=1,
        dispatch_batches=dispatch,
    )
    everything = values(loader)
    skipping = skip_first_batches(skip_first_batches(loader, 1), 1)
    assert values(skipping) == everything[2:]


def test_skipping_nothing_too_much_or_backwards() -> None:
    loader = prepared(6, 2)
    assert skip_first_batches(loader, 0) is loader
    assert values(skip_first_batches(loader, 9)) == []
    with pytest.raises(ConfigError, match="num_batches=-1"):
        skip_first_batches(loader, -1)


# -- unusual loaders -----------------------------------------------------------------------------


def test_loaders_that_do_not_batch_are_shared_out() -> None:
    def shares(loader: DataLoader) -> list[list]:
        return [
            [
                batch.tolist() if isinstance(batch, torch.Tensor) else batch
                for batch in prepare_data_loader(loader, num_processes=2, process_index=rank)
            ]
            for rank in range(2)
        ]

    assert shares(DataLoader(range(5), batch_size=None)) == [[0, 2, 4], [1, 3, 0]]
    batches = BatchSampler(SequentialSampler(range(6)), 2, False)
    data = TensorDataset(torch.arange(6))
    loader = DataLoader(data, batch_size=None, sampler=batches, collate_fn=lambda b: b[0])
    assert shares(loader) == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


def test_streams_are_dispatched_where_there_are_several_processes() -> None:
    loader = DataLoader(Stream(8), batch_size=2)
    assert isinstance(prepare_data_loader(loader), DataLoaderShard)
    assert isinstance(prepare_data_loader(loader, num_processes=2), DataLoaderDispatcher)
    assert isinstance(prepare_data_loader(loader, dispatch_batches=True), DataLoaderDispatcher)


def test_workers_of_streams_are_warned_of_or_refused() -> None:
    stream = Stream(8)
    with pytest.warns(UserWarning, match=r"num_workers=2.*does not declare `shards_by_worker`"):
        prepare_data_loader(DataLoader(stream, num_workers=2))
    stream.shards_by_worker = False
    with pytest.raises(ConfigError, match=r"num_workers=2.*get_worker_info"):
        prepare_data_loader(DataLoader(stream, num_workers=2))


def test_batches_that_do_not_split_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=3 on 2 processes"):
        prepare_data_loader(DataLoader(range(6), batch_size=3), num_processes=2, split_batches=True)


def told(config: bool, **flags: Any) -> Accelerator:
    """Return an `Accelerator` told by its configuration, or by the older arguments."""
    if config:
        return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**flags))
    return Accelerator(cpu=True, **flags)


def shares(config: bool, flags: dict[str, Any]) -> list[list[int]]:
    loader = told(config, **flags).prepare(DataLoader(range(6), batch_size=4))
    return values(loader)


@pytest.mark.parametrize("size", [1, 2])
def test_split_and_even_batches(size: int) -> None:
    for config in (True, False):
        found = run_distributed(shares, size, config, {"split_batches": True})
        pieces = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}
        assert [batches[0] for batches in found] == pieces[size]
        found = run_distributed(shares, size, config, {"even_batches": False})
        short = [batch for rank in found for batch in rank if len(batch) < 4]
        assert short == [[4, 5]]
        found = run_distributed(shares, size, config, {})
        assert [len(batch) for batch in found[0]] == ([4, 2] if size == 1 else [4])
        assert len({tuple(map(len, rank)) for rank in found}) == 1


@pytest.mark.parametrize("config", [True, False])
def test_who_reads(config: bool) -> None:
    original = DataLoader(range(6), batch_size=2)
    loader = told(config, dispatch_batches=True).prepare(original)
    assert isinstance(loader, DataLoaderDispatcher)
    assert values(loader) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("config", [True, False])
def test_the_order_is_seeded(config: bool) -> None:
    loader = told(config, use_seedable_sampler=True).prepare(DataLoader(range(6), shuffle=True))
    assert isinstance(loader.sampler, SeedableRandomSampler)


def test_the_seed_of_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        accelerator = told(True, use_seedable_sampler=True, data_seed=seed)
        return values(accelerator.prepare(DataLoader(range(20), shuffle=True)))

    torch.manual_seed(1)
    first = order(5)
    torch.manual_seed(2)
    assert order(5) == first
    assert order(6) != first


def test_copies_do_not_block() -> None:
    for non_blocking in (True, False):
        batch = Moving()
        accelerator = told(True, non_blocking=non_blocking, dispatch_batches=True)
        original = DataLoader([0], collate_fn=lambda _: (torch.zeros(1), batch))  # noqa: B023
        list(accelerator.prepare(original))
        assert [flag for _, flag in batch.moves] == [non_blocking]
        assert accelerator.non_blocking is non_blocking


def test_loaders_of_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda package: False)
    accelerator = told(True, use_stateful_dataloader=True)
    with pytest.raises(MissingPackageError, match="torchdata"):
        accelerator.prepare(DataLoader(range(3)))


def drawn_after_a_pass(rng_types: list[str] | None) -> float:
    accelerator = Accelerator(cpu=True, rng_types=rng_types)
    torch.manual_seed(accelerator.process_index)
    values(accelerator.prepare(DataLoader(range(6))))
    return torch.rand(1).item()


@pytest.mark.parametrize("size", [1, 2])
def test_a_pass_synchronises_the_named_generators(size: int) -> None:
    assert len(set(run_distributed(drawn_after_a_pass, size, ["torch"]))) == 1
    assert len(set(run_distributed(drawn_after_a_pass, size, None))) == size


# -- Accelerator.prepare_data_loader and skip_first_batches --------------------------------------


def test_one_loader_is_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(range(3)))
    assert isinstance(loader, DataLoaderShard)
    assert accelerator.prepare_data_loader(loader) is loader


def test_batches_stay_where_they_are_without_device_placement() -> None:
    original = DataLoader([torch.zeros(1, device="meta")], collate_fn=tuple)
    left = Accelerator(cpu=True).prepare_data_loader(original, device_placement=False)
    assert next(iter(left))[0].device.type == "meta"
    placed = Accelerator(cpu=True).prepare_data_loader(original)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        next(iter(placed))


def cut_backwards() -> list[list[int]]:
    def cut(batch: torch.Tensor, part: slice, process_index: int, num_processes: int):
        return batch.flip(0)[part]

    accelerator = told(True, dispatch_batches=True)
    original = DataLoader(range(6), batch_size=1)
    return values(accelerator.prepare_data_loader(original, slice_fn_for_dispatch=cut))


@pytest.mark.parametrize("size", [1, 2])
def test_the_callers_slice_function_cuts(size: int) -> None:
    wanted = {
        1: [[[0], [1], [2], [3], [4], [5]]],  # one process gets all: nothing is cut
        2: [[[1], [3], [5]], [[0], [2], [4]]],
    }
    assert run_distributed(cut_backwards, size) == wanted[size]


def test_the_first_batches_are_skipped() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(6), batch_size=2))
    assert values(accelerator.skip_first_batches(loader, num_batches=2)) == [[4, 5]]
    assert values(skip_first_batches(loader, 1)) == [[2, 3], [4, 5]]


# -- prepare_data_loader, one parameter at a time ------------------------------------------------


def test_the_documented_parameters_of_sharing_out() -> None:
    assert values(prepared(6, 2, 2, 1)) == [[2, 3], [0, 1]]
    assert values(prepared(6, 2, 2, 1, split_batches=True)) == [[1], [3], [5]]
    assert values(prepared(6, 2, 2, 1, even_batches=False)) == [[2, 3]]


def test_the_documented_parameters_of_placement() -> None:
    meta = torch.device("meta")
    original = DataLoader(range(2))
    loader = prepare_data_loader(original, meta, put_on_device=True)
    assert next(iter(loader)).device == meta
    assert next(iter(prepare_data_loader(original, meta))).device.type == "cpu"
    batch = Moving()
    list(
        prepare_data_loader(
            DataLoader([0], collate_fn=lambda _: batch), meta, put_on_device=True, non_blocking=True
        )
    )
    assert batch.moves == [(meta, True)]


def test_the_documented_parameters_of_order() -> None:
    original = DataLoader(range(20), shuffle=True)
    assert isinstance(original.sampler, RandomSampler)
    loader = prepare_data_loader(original, use_seedable_sampler=True, data_seed=7)
    assert loader.sampler.seed == 7
    named = prepare_data_loader(original, rng_types=["torch", "generator"])
    assert named.rng_types == ["torch"]  # the sampler has no generator of its own


def test_skipping_leaves_out_batches_and_fetches_none_of_them() -> None:
    dataset = Counting(6)
    assert values(skip_first_batches(DataLoader(dataset, batch_size=2), 2)) == [[4, 5]]
    assert dataset.fetched == [4, 5]
