"""Windows of micro-batches end once, with the loader that drives the loop, however it is read."""

from __future__ import annotations

import tracemalloc
import warnings
from collections import deque
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


def ahead_with_the_last_in_hand(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    """Convert batches in windows of four, while the loop holds on to the latest as it was given."""
    window = []
    for index, batch in enumerate(train, start=1):
        window.append([tensor.double() for tensor in batch])
        if len(window) == 4 or index == len(train):
            for changed in window:
                micro_batch([tensor.float() for tensor in changed])
            window.clear()


def whole(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    for batch in list(train):
        micro_batch(batch)


def whole_and_changed(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    for batch in [[tensor * 2 for tensor in batch] for batch in train]:
        micro_batch(batch)


def one_ahead_and_changed(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    changed = ([tensor * 2 for tensor in batch] for batch in train)
    one_ahead(changed, other, micro_batch)


def two_ahead_evaluated(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    """Evaluate before each micro-batch, also when the pass over `train` has ended."""
    batches = iter(train)
    fetched = deque(islice(batches, 2))
    while fetched:
        fetched.extend(islice(batches, 1))
        with torch.no_grad():
            for _ in other:
                pass
        micro_batch(fetched.popleft())


def whole_evaluated(train: Any, other: Any, micro_batch: Callable[[Any], None]) -> None:
    """Evaluate between the pass over `train` and its micro-batches."""
    batches = list(train)
    with torch.no_grad():
        for _ in other:
            pass
    for batch in batches:
        micro_batch(batch)
        for _ in other:
            pass


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
    (ahead_and_changed, 1),
    (ahead_with_the_last_in_hand, 1),
    (whole, 1),
    (whole_and_changed, 1),
    (whole_evaluated, 3),
    (one_ahead, 1),
    (one_ahead_and_changed, 1),
    (two_ahead_evaluated, 3),
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


COUNTS = (2, 4, 5, 7)  # of batches


def ends_of_all(dispatch: bool, counts: tuple[int, ...]) -> dict[str, list[list[bool]]]:
    return {
        f"{loop.__name__} {count} {other}": ends(loop, count, other or count, dispatch)
        for loop, other in LOOPS
        for count in counts
    }


@pytest.mark.parametrize(
    ("world_size", "dispatch", "counts"),
    [
        (1, False, COUNTS),
        pytest.param(2, False, COUNTS, marks=pytest.mark.slow),
        pytest.param(2, True, COUNTS, marks=pytest.mark.slow),
    ],
)
def test_a_pass_ends_its_last_window_once(
    world_size: int, dispatch: bool, counts: tuple[int, ...]
) -> None:
    for found in run_distributed(ends_of_all, world_size, dispatch, counts):
        wrong = {
            name: passes
            for name, passes in found.items()
            if passes != [expected(int(name.split()[1]))] * 3
        }
        assert wrong == {}


def test_a_loader_within_a_loop_over_another_ends_its_windows() -> None:
    assert ends(around, 5, 2, False) == [expected(5) * 2] * 3


def test_a_pass_that_a_shorter_second_loader_ends_is_told_of() -> None:
    """Its last window stays open, and the next pass goes on with it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train = accelerator.prepare(DataLoader(TensorDataset(torch.arange(9.0))))
    other = accelerator.prepare(DataLoader(TensorDataset(torch.arange(3.0))))
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

    with pytest.warns(UserWarning, match="2 batches of the last pass"):
        two_passes()


def test_first_batches_that_are_skipped_leave_the_window_open_and_are_told_of() -> None:
    """They cannot be told from batches that are fetched ahead."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(torch.arange(3.0).view(3, 1)))
    found = []

    def two_passes() -> None:
        for skipped in (1, 0):
            for index, _batch in enumerate(loader):
                if index < skipped:
                    continue
                with accelerator.accumulate():
                    found.append(accelerator.sync_gradients)

    with pytest.warns(UserWarning, match="1 batches of the last pass.*skip_first_batches"):
        two_passes()
    assert found == [False, False, False, True, True]


def test_a_window_that_ends_too_early_is_told_of() -> None:
    """A loop that takes the first batch alone, and fetches the others ahead."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(torch.arange(4.0).view(4, 1)))
    found = []

    def one_pass() -> None:
        batches = iter(loader)
        for size in (1, 3):
            for _batch in list(islice(batches, size)):
                with accelerator.accumulate():
                    found.append(accelerator.sync_gradients)

    with pytest.warns(UserWarning, match="ended too early"):
        one_pass()
    assert found == [False, True, False, True]


def test_windows_of_the_caller_are_not_told_of() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5.0))))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for size in (1, 2, 5) * 2:
            batches = iter(loader)
            while window := list(islice(batches, size)):
                for _batch in window:
                    with accelerator.accumulate(sync_gradients=False):
                        pass


def test_an_evaluation_is_not_fetched_ahead() -> None:
    """Micro-batches of a loader that is not prepared end windows by their count."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.arange(3.0))))
    with torch.no_grad():
        for _ in evaluation:
            pass
    found = []
    for _ in range(8):
        with accelerator.accumulate():
            found.append(accelerator.sync_gradients)
    assert found == [False, False, False, True] * 2


def test_another_loop_does_not_end_with_the_batches_that_the_last_one_skipped() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    first, second = (
        accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0)))) for _ in range(2)
    )
    for index, _batch in enumerate(first):
        if index < 3:
            with accelerator.accumulate():
                pass
    found = []
    for _batch in second:
        with accelerator.accumulate():
            found.append(accelerator.sync_gradients)
    assert found == [False, False, True, True]


def bytes_held(step: Callable[[int], Any], num_batches: int) -> int:
    """Return the bytes held after the last of `num_batches` beyond those after the tenth."""
    tracemalloc.start()
    try:
        for index in range(num_batches):
            step(index)
            if index == 10:
                before = tracemalloc.get_traced_memory()[0]
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("explicit", [True, False])
def test_batches_without_a_micro_batch_take_no_memory(explicit: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(2100.0))))
    batches = iter(loader)

    def step(index: int) -> None:
        next(batches)
        if explicit:
            with accelerator.accumulate(sync_gradients=index % 4 == 3):
                pass

    assert bytes_held(step, 2000) < 200_000


@pytest.mark.parametrize("after", [1, 3])
def test_an_evaluation_beside_an_unprepared_loader_ends_no_window(after: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    evaluated = accelerator.prepare(DataLoader(range(6), batch_size=2))
    found = []
    for number in range(12):  # batches of a loader that is not prepared
        with accelerator.accumulate():
            found.append(accelerator.sync_gradients)
        if number % 4 == after:
            for _ in evaluated:  # gradients stay enabled
                pass
    assert found == [False, False, False, True] * 3
