"""Where the order of samples comes from, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel import Accelerator, DataLoaderConfiguration
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.machine.errors import ConfigError
from accel.state import AcceleratorState, PartialState
from tests.accel.data.parts import flat, seedable, values
from tests.helpers import run_distributed

# -- permutations of their own -------------------------------------------------------------------


def test_loaders_of_one_seed_draw_permutations_of_their_own() -> None:
    accelerator = seedable(data_seed=3)
    loaders = accelerator.prepare(*(DataLoader(range(20), shuffle=True) for _ in range(3)))
    orders = [flat(loader) for loader in loaders]
    assert len({tuple(order) for order in orders}) == 3
    again = seedable(data_seed=3)
    repeated = again.prepare(*(DataLoader(range(20), shuffle=True) for _ in range(3)))
    assert [flat(loader) for loader in repeated] == orders


def test_loaders_prepared_without_an_engine_are_counted() -> None:
    originals = [DataLoader(range(20), shuffle=True) for _ in range(2)]
    one, two = (prepare_data_loader(loader, use_seedable_sampler=True) for loader in originals)
    assert flat(one) != flat(two)


def test_generators_that_are_seeded_alike_draw_alike() -> None:
    def loader(generator: torch.Generator) -> DataLoader[Any]:
        return DataLoader(range(20), shuffle=True, generator=generator)

    accelerator = seedable()
    paired = [accelerator.prepare(loader(torch.Generator().manual_seed(4))) for _ in range(2)]
    assert flat(paired[0]) == flat(paired[1])
    shared = torch.Generator().manual_seed(4)
    apart = [accelerator.prepare(loader(shared)) for _ in range(2)]
    assert flat(apart[0]) != flat(apart[1])


# -- the caller's sampler ------------------------------------------------------------------------


def reweighted() -> tuple[list[int], bool, bool]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    batches = BatchSampler(sampler, 2, False)
    loader = accelerator.prepare(DataLoader(range(8), batch_sampler=batches))
    values(loader)
    sampler.weights = torch.tensor([0.0] * 7 + [1.0], dtype=torch.double)
    return flat(loader), loader.sampler is sampler, sampler.generator is None


@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_change_later_count(size: int) -> None:
    for drawn, same, untouched in run_distributed(reweighted, size):
        assert set(drawn) == {7}
        assert same
        assert untouched


def disagreeing() -> list[str]:
    rank = PartialState(cpu=True).process_index
    found = []
    for sampler in (
        SubsetRandomSampler(range(rank, 12, 2)),
        list(range(rank, 12, 2)),
        DistributedSampler(range(12), num_replicas=4, rank=rank),
        OwnShards(range(12)),
    ):
        try:
            flat(prepare_data_loader(DataLoader(range(12), batch_size=2, sampler=sampler)))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


class OwnShards(DistributedSampler[Any]):
    """Shards in a way of its own."""

    def __iter__(self):
        return iter(range(self.rank, 12, self.num_replicas))


def test_samplers_that_shard_already_are_refused() -> None:
    for told in run_distributed(disagreeing, 2):
        assert "SubsetRandomSampler that differs between ranks" in told[0]
        assert "list that gives each rank other samples" in told[1]
        assert "num_replicas=4" in told[2]
        assert "OwnShards" in told[3]


def sharded_data(dispatch: bool) -> list[str]:
    rank = PartialState(cpu=True).process_index
    found = []
    for data in (Subset(range(12), range(rank, 12, 2)), range(12 - rank), range(12)):
        try:
            flat(prepare_data_loader(DataLoader(data, batch_size=2), dispatch_batches=dispatch))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("dispatch", [False, True])
def test_data_that_is_sharded_by_rank_is_refused(dispatch: bool) -> None:
    for subset, length, same in run_distributed(sharded_data, 2, dispatch):
        assert "differs between ranks (indices of the subset: rank 0: " in subset
        assert "differs between ranks (number of samples: rank 0: 12, rank 1: 11)" in length
        assert same == ""


def unsharded(drop_last: bool) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    sampler = DistributedSampler(range(11), seed=5, drop_last=drop_last)
    loader = accelerator.prepare(DataLoader(range(11), batch_size=2, sampler=sampler))
    passes = [accelerator.gather_for_metrics(torch.tensor(flat(loader)[:4])).tolist()]
    sampler.set_epoch(7)  # the caller's own object still decides
    assert loader.epoch == 7
    return [*passes, flat(loader)]


def test_a_distributed_sampler_gives_the_order_of_all_its_ranks() -> None:
    wanted = torch.randperm(11, generator=torch.Generator().manual_seed(12)).tolist()
    ranks = run_distributed(unsharded, 2, False)
    read = [batch for pair in zip(*(rank[1] for rank in ranks), strict=True) for batch in pair]
    assert set(read) == set(wanted)
    assert ranks[0][1][:2] + ranks[1][1][:2] == wanted[:4]
    dropped = run_distributed(unsharded, 2, True)
    assert set(dropped[0][1]) | set(dropped[1][1]) == set(wanted[:10])


class Failing(Sampler[int]):
    def __len__(self) -> int:
        return 4

    def __iter__(self):
        if PartialState().is_main_process:
            raise OSError("no index")
        return iter(range(4))


class Endless(Sampler[int]):
    """Draws without end, another number on each rank."""

    def __iter__(self):
        while True:
            yield int(torch.randint(1000, ()))


def endless(folder: str) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(1000), batch_size=2, sampler=Endless()))
    found = []
    for number, batch in enumerate(loader):
        found.append(accelerator.gather(batch).tolist())
        if number == 1:
            accelerator.save_state(folder)
        if number == 2:
            break
    accelerator.load_state(folder)
    resumed = next(iter(skip_first_batches(loader, 2)))
    return [found[2], accelerator.gather(resumed).tolist()]


def test_samplers_without_end_are_agreed_on_and_resumed(tmp_path: Path) -> None:
    for size in (1, 2):
        ranks = run_distributed(endless, size, str(tmp_path / str(size)))
        assert all(len(rank[0]) == 2 * size for rank in ranks)
        if size == 2:
            assert ranks[0][0] == ranks[0][1] == ranks[1][0]


def failing() -> str:
    Accelerator(cpu=True)
    loader = prepare_data_loader(DataLoader(range(4), sampler=Failing()))
    try:
        flat(loader)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_sampler_that_fails_fails_on_every_rank() -> None:
    main, other = run_distributed(failing, 2)
    assert main == "OSError: no index"
    assert "Rank 0 failed to draw" in other


# -- resuming ------------------------------------------------------------------------------------


def saved_between(folder: str) -> bool:
    def engine(seed: int) -> tuple[Accelerator, Any]:
        AcceleratorState._reset_state()
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        torch.manual_seed(seed)
        original = DataLoader(
            range(20), batch_size=2, shuffle=True, num_workers=1, multiprocessing_context="fork"
        )
        return accelerator, accelerator.prepare(original)

    accelerator, loader = engine(1)
    flat(loader)
    accelerator.save_state(folder)
    following = flat(loader)
    accelerator, loader = engine(2)
    accelerator.load_state(folder)
    return flat(loader) == following


def test_stateful_loaders_saved_between_epochs_keep_their_order(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    assert run_distributed(saved_between, 2, str(tmp_path / "state")) == [True, True]


class Drawing(Sampler[int]):
    """Draws from torch's own generator when a pass begins."""

    def __len__(self) -> int:
        return 32

    def __iter__(self):
        return iter(torch.randperm(32).tolist())


def saved_elsewhere(folder: str, saving: bool, dispatch: bool, known: bool) -> list[int]:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(3 if saving else 4)
    size = 8 // accelerator.num_processes
    order: dict[str, Any] = {"shuffle": True} if known else {"sampler": Drawing()}
    loader = accelerator.prepare(DataLoader(range(32), batch_size=size, **order))
    if not saving:
        accelerator.load_state(folder)
        return accelerator.gather(torch.tensor(flat(skip_first_batches(loader, 2)))).tolist()
    seen: list[int] = []
    for number, batch in enumerate(loader, start=1):
        seen += accelerator.gather(batch).tolist()
        if number == 2:
            accelerator.save_state(folder)
            break
    return seen


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("dispatch", "known"), [(False, True), (True, True), (True, False)])
def test_a_pass_is_gone_on_with_on_another_number_of_processes(
    one: int, other: int, dispatch: bool, known: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    seen = run_distributed(saved_elsewhere, one, folder, True, dispatch, known)[0]
    rest = run_distributed(saved_elsewhere, other, folder, False, dispatch, known)[0]
    assert sorted(seen + rest) == list(range(32))


class Length(Dataset[int]):
    """A data set that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_data_sets_need_not_be_hashable() -> None:
    dataset = Length()
    flat(prepare_data_loader(DataLoader(dataset)))
    assert dataset.epoch == 0
