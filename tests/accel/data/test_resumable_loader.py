"""The epochs of prepared loaders and their data sets, and passes that are resumed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accel.data.pass_tracking import PreparedLoader
from accel.data.prepare import prepare_data_loader, skip_first_batches
from tests.accel.data.parts import Counting, flat, seedable, values

# -- epochs --------------------------------------------------------------------------------------


class Epochs(Counting):
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
        DataLoader(Epochs(3), num_workers=workers, multiprocessing_context=context)
    )
    assert [flat(loader) for _ in range(3)] == [[0] * 3, [1] * 3, [2] * 3]


def test_loaders_over_one_data_set_set_their_own_epochs() -> None:
    dataset = Epochs(3)
    training, evaluation = (prepare_data_loader(DataLoader(dataset)) for _ in range(2))
    flat(training)
    seen = []
    for batch in training:
        seen += batch.tolist()
        assert flat(evaluation) == [len(seen) - 1] * 3
    assert seen == [1, 1, 1]
    zipped = zip(training, evaluation, strict=True)
    assert [[a.item(), b.item()] for a, b in zipped] == [[2, 3]] * 3


def test_persistent_workers_are_warned_of() -> None:
    loader = prepare_data_loader(
        DataLoader(
            Epochs(2), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )
    )
    flat(loader)
    with pytest.warns(UserWarning, match="persistent_workers=True"):
        flat(loader)


def test_passes_left_early_that_repeat_are_warned_of() -> None:
    loader = seedable().prepare(DataLoader(range(20), shuffle=True))
    first = [next(iter(loader)).item() for _ in range(2)]
    with pytest.warns(UserWarning, match="set_epoch") as caught:
        again = [next(iter(loader)).item() for _ in range(3)]
    assert len(caught) == 1
    assert {*first, *again} == {first[0]}
    loader.set_epoch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat(loader)


def test_the_last_batch_in_hand_ends_a_pass() -> None:
    one, two = seedable().prepare(*(DataLoader(range(9), shuffle=True) for _ in range(2)))
    passes = [[b.item() for _, b in zip(one, two, strict=False)] for _ in range(2)]
    assert passes[0] != passes[1]
    assert (one.epoch, two.epoch) == (2, 2)


# -- resuming ------------------------------------------------------------------------------------


def test_a_pass_left_early_continues_in_its_order() -> None:
    for flags in ({}, {"shuffle": True}):
        loader = prepare_data_loader(DataLoader(range(20), batch_size=4, **flags))
        left = [next(iter(loader)).tolist()]
        rest = values(skip_first_batches(loader, 1))
        assert sorted(i for batch in left + rest for i in batch) == list(range(20))
        assert loader.epoch == 1


@pytest.mark.parametrize("seedable", [False, True])
def test_a_saved_state_has_the_order_of_the_pass_under_way(seedable: bool) -> None:
    def make(seed: int) -> PreparedLoader:
        loader = DataLoader(
            range(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )
        return prepare_data_loader(loader, use_seedable_sampler=seedable)

    loader = make(1)
    values(loader)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            state = loader.order_state()
    following = values(loader)
    resumed = make(2)
    resumed.load_order_state(state)
    assert values(skip_first_batches(resumed, 2)) == seen[2:]
    assert values(resumed) == following


def test_another_data_set_than_the_saved_one_is_warned_of() -> None:
    state = prepare_data_loader(DataLoader(range(12))).order_state()
    with pytest.warns(UserWarning, match="over 9 samples"):
        prepare_data_loader(DataLoader(range(9))).load_order_state(state)


class Drawn(Sampler[int]):
    """The indices below 24 in an order drawn from torch's generator."""

    def __len__(self) -> int:
        return 24

    def __iter__(self):
        return iter(torch.randperm(24).tolist())


class DrawnStream(IterableDataset):
    def __iter__(self):
        return iter(Drawn())


LOADERS = {
    "sampler": lambda: DataLoader(range(24), 4, sampler=Drawn()),
    "stream": lambda: DataLoader(DrawnStream(), 4),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_seeded_pass_without_its_first_batches_has_the_order_of_the_whole(
    kind: str, count: int, dispatch: bool
) -> None:
    """Libraries resume so, in a process that knows of no pass."""

    def loader(skipped: int) -> list[list[int]]:
        made = prepare_data_loader(
            LOADERS[kind](), num_processes=count, process_index=0, dispatch_batches=dispatch
        )
        torch.manual_seed(17)
        return values(skip_first_batches(made, skipped))

    assert loader(2) == loader(0)[2:]
