"""Windows of micro-batches end once, with the loader that drives the loop, however it is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from tests.helpers import run_distributed

Loop = Callable[[Any, Any, Callable[[Any], None]], None]


def ahead(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    """Fetch the batches of a window before its micro-batches, as for a count of tokens."""
    batches = iter(train)
    for start in range(0, len(train), 2):
        window = [next(batches) for _ in range(min(2, len(train) - start))]
        for batch in window:
            micro_batch(batch)


def ahead_to_the_end(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    batches = iter(train)
    while window := list(islice(batches, 2)):
        for batch in window:
            micro_batch(batch)


def ahead_and_changed(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    """Keep nothing of what the loader gave."""
    batches = iter(train)
    while window := [[tensor.double() for tensor in batch] for batch in islice(batches, 2)]:
        for batch in window:
            micro_batch([tensor.float() for tensor in batch])


def one_ahead(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    batches = iter(train)
    following = next(batches)
    while following is not None:
        current, following = following, next(batches, None)
        micro_batch(current)


def plain(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    for batch in train:
        micro_batch(batch)


def zipped(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    for batch, _ in zip(train, other, strict=False):
        micro_batch(batch)


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def repeated(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    for batch, _ in zip(train, forever(other), strict=False):
        micro_batch(batch)


def restarted(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    others = iter(other)
    next(others)
    for batch in train:
        try:
            next(others)
        except StopIteration:
            others = iter(other)
            next(others)
        micro_batch(batch)


def ahead_side_by_side(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    pairs = zip(train, forever(other), strict=False)
    while window := list(islice(pairs, 2)):
        for batch, _ in window:
            micro_batch(batch)


def around(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    """Train on every batch of the inner loader, for each batch of an outer one."""
    for _ in other:
        for batch in train:
            micro_batch(batch)


def evaluated_first(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    for batch in train:
        for _ in other:
            pass
        micro_batch(batch)


def with_looks(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    """Look at a batch of another loader after each micro-batch."""
    others = forever(other)
    for batch in train:
        micro_batch(batch)
        next(others)


def ends(loop: Loop, num_batches: int, num_other: int, dispatch: bool) -> list[list[bool]]:
    """Return which micro-batches of three passes end a window of two, or step, on this process."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    model = torch.nn.Linear(1, 1)

    def loader(batches: int) -> DataLoader[Any]:
        samples = torch.ones(2 * batches * accelerator.num_processes, 1)
        return DataLoader(TensorDataset(samples), batch_size=2)

    model, optimizer, train, other = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader(num_batches),
        loader(num_other),
    )
    found: list[bool] = []

    def micro_batch(batch: Any) -> None:
        with accelerator.accumulate(model):
            before = model_weight(model)
            accelerator.backward(model(batch[0]).mean())
            optimizer.step()
            optimizer.zero_grad()
            assert (model_weight(model) != before) == accelerator.sync_gradients
            found.append(accelerator.sync_gradients)

    passes = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3):
            loop(train, other, micro_batch)
            passes.append(list(found))
            found.clear()
    accelerator.end_training()
    return passes


def model_weight(model: torch.nn.Module) -> float:
    return next(model.parameters()).item()


def expected(num_batches: int) -> list[bool]:
    return [index % 2 == 1 or index == num_batches - 1 for index in range(num_batches)]


LOOPS = [
    (ahead, 1),
    (ahead_to_the_end, 1),
    (one_ahead, 1),
    (zipped, 0),  # as many as the other
    (zipped, 9),
    (repeated, 3),
    (repeated, 2),
    (restarted, 3),
    (restarted, 9),
    (ahead_side_by_side, 3),
    (with_looks, 3),
    (evaluated_first, 2),
    (plain, 1),
]


def ends_of_all(dispatch: bool) -> dict[str, list[list[bool]]]:
    return {
        f"{loop.__name__} {count} {other}": ends(loop, count, other or count, dispatch)
        for loop, other in LOOPS
        for count in (2, 4, 5, 7)
    }


@pytest.mark.parametrize(("world_size", "dispatch"), [(1, False), (2, False), (2, True)])
def test_a_pass_ends_its_last_window_once(world_size: int, dispatch: bool) -> None:
    for found in run_distributed(ends_of_all, world_size, dispatch):
        wrong = {
            name: passes
            for name, passes in found.items()
            if passes != [expected(int(name.split()[1]))] * 3
        }
        assert wrong == {}


def test_batches_that_are_copied_ahead_are_known_from_the_first_window_on() -> None:
    assert ends(ahead_and_changed, 6, 1, False) == [expected(6)] * 3


def test_a_loader_within_a_loop_over_another_ends_its_windows() -> None:
    assert ends(around, 5, 2, False) == [expected(5) * 2] * 3


def test_a_pass_that_a_shorter_second_loader_ends_is_told_of() -> None:
    """Its last window stays open, and the next pass goes on with it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train = accelerator.prepare(DataLoader(torch.arange(9.0)))
    other = accelerator.prepare(DataLoader(torch.arange(3.0)))
    found = []

    def two_passes() -> None:
        for _ in range(2):
            for _pair in zip(train, other, strict=False):
                with accelerator.accumulate():
                    found.append(accelerator.sync_gradients)

    with pytest.warns(UserWarning, match="zip.. the shorter loader first"):
        two_passes()
    assert found == [False, True, False, True, False, True]


def test_skipped_batches_do_not_keep_a_window_open() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, found = torch.nn.Linear(1, 1), []
    loader = accelerator.prepare(DataLoader(torch.arange(7.0).view(7, 1)))
    for _ in range(2):
        for index, batch in enumerate(loader):
            if index in (1, 5):
                continue
            with accelerator.accumulate(model):
                found.append((int(batch), accelerator.sync_gradients))
    steps = [(0, False), (2, False), (3, False), (4, True), (6, True)]
    assert found == steps * 2


def test_a_window_that_a_skipped_last_batch_leaves_open_is_told_of() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(torch.arange(3.0).view(3, 1)))

    def two_passes() -> None:
        for _ in range(2):
            for index, _batch in enumerate(loader):
                if index > 0:
                    continue
                with accelerator.accumulate():
                    pass

    with pytest.warns(UserWarning, match="1 batches of the last pass"):
        two_passes()
