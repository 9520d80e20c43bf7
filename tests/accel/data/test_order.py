"""R1, E2: every rank draws one order, and a resumed pass has the order that it began with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from accel import Accelerator, DataLoaderConfiguration
from accel.comm import rng
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.machine.errors import ConfigError
from accel.state import PartialState
from accel.utils import TorchTensorParallelPlugin, set_seed
from tests.accel.data.parts import Counting, flat
from tests.helpers import run_distributed

# -- the caller's sampler ------------------------------------------------------------------------


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


# -- resuming ------------------------------------------------------------------------------------


class Failing(Sampler[int]):
    def __len__(self) -> int:
        return 4

    def __iter__(self):
        if PartialState().is_main_process:
            raise OSError("no index")
        return iter(range(4))


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


# -- epochs --------------------------------------------------------------------------------------


class Learned(Counting):
    """Gives the epoch that was set last."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_learns_the_epoch_before_it_is_read(workers: int) -> None:
    context = "fork" if workers else None
    loader = prepare_data_loader(
        DataLoader(Learned(3), num_workers=workers, multiprocessing_context=context)
    )
    assert [flat(loader) for _ in range(3)] == [[0] * 3, [1] * 3, [2] * 3]


# -- resuming ------------------------------------------------------------------------------------


class Private(Sampler[int]):
    """Draws each of 12 indices when it is wanted, from a generator that nobody knows of."""

    def __init__(self) -> None:
        self.source = random.Random(5)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        left = list(range(12))
        while left:
            yield left.pop(self.source.randrange(len(left)))


def test_a_sampler_with_a_generator_of_its_own_is_told_at_the_resume(tmp_path: Path) -> None:
    def loader() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(DataLoader(range(12), sampler=Private()))

    accelerator, read_first = loader()
    flat(read_first)
    for number, _ in enumerate(read_first):
        if number == 2:
            accelerator.save_state(str(tmp_path))
    accelerator, resumed = loader()
    accelerator.load_state(str(tmp_path))
    with pytest.warns(UserWarning, match="sampler Private that does not draw again what it had"):
        flat(skip_first_batches(resumed, 3))


def test_another_data_set_than_the_saved_one_is_warned_of() -> None:
    state = prepare_data_loader(DataLoader(range(12))).order_state()
    with pytest.warns(UserWarning, match="over 9 samples"):
        prepare_data_loader(DataLoader(range(9))).load_order_state(state)


class Shuffled(Sampler[int]):
    """The indices below `length` in an order drawn from Python's generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)


def shuffled() -> Any:
    random.seed(1)
    loader = DataLoader(range(12), batch_size=2, sampler=Shuffled(12))
    return prepare_data_loader(loader, num_processes=2, process_index=0)


def test_a_resume_at_the_end_of_a_pass_draws_no_order_for_nothing() -> None:
    Accelerator(cpu=True)
    loader = shuffled()
    for number, _ in enumerate(loader, 1):
        if number == 3:
            saved, generators = loader.order_state(), rng.capture()
    wanted = [batch.tolist() for batch in loader], random.random()
    loader = shuffled()
    loader.load_order_state(saved)
    rng.restore(generators)
    assert list(skip_first_batches(loader, 3)) == []
    assert ([batch.tolist() for batch in loader], random.random()) == wanted


def of_torchs_generator(dispatch: bool) -> tuple[list[list[int]], float]:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    torch.rand(3)  # of a model
    given = torch.Generator().manual_seed(3)  # of which nothing is drawn before a pass
    prepared = [
        accelerator.prepare(DataLoader(range(8), 2, shuffle=True, generator=generator))
        for generator in (None, None, given)
    ]
    drawn = torch.rand(1).item()
    found = [[i for batch in loader for i in batch.tolist()] for loader in prepared]
    accelerator.end_training()
    return found, drawn


def test_a_shuffled_loader_takes_its_seed_from_torchs_generator() -> None:
    """As torch's own sampler does in a single process, and the documented package on several."""
    set_seed(0)
    torch.rand(3)
    seeds = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(2)]
    drawn = torch.rand(1).item()
    orders = [torch.randperm(8, generator=torch.Generator().manual_seed(s)) for s in seeds]
    for rank, found in enumerate(run_distributed(of_torchs_generator, 2, False)):
        own = [order.view(4, 2)[rank::2].flatten().tolist() for order in orders]
        assert found[0][:2] == own
        assert found[1] == drawn


# -- metrics -------------------------------------------------------------------------------------


def of_single_samples() -> tuple[list[int], int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(3)), batch_size=None))
    found = [accelerator.gather_for_metrics(x.view(1)).tolist() for (x,) in loader]
    return [i for part in found for i in part], loader.total_batch_size


def test_single_samples_are_counted_once() -> None:
    assert run_distributed(of_single_samples, 2) == [([0, 1, 2], 2)] * 2


def of_shared_data(rows: int) -> list[int]:
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), batch_size=4))
    found = [accelerator.gather_for_metrics(x.repeat_interleave(rows)) for (x,) in loader]
    return torch.cat(found).tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_batches_that_nothing_completes_are_kept_whole(rows: int) -> None:
    wanted = [i for i in range(6) for _ in range(rows)]
    assert run_distributed(of_shared_data, 2, rows) == [wanted] * 2
