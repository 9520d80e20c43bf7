"""E2: stateful loaders continue after the batch in hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel import Accelerator, DataLoaderConfiguration
from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.utils import set_seed
from tests.helpers import run_distributed

stateful = pytest.importorskip("torchdata.stateful_dataloader")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def prepared(dataset=range(12), workers: int = 0, **flags):
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    return prepare_data_loader(loader, use_stateful_dataloader=True, **flags)


@pytest.mark.parametrize("dataset", [range(12), Stream()])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_state_goes_on_after_the_batch_in_hand(dataset, workers: int, dispatch: bool) -> None:
    loader = prepared(dataset, workers, dispatch_batches=dispatch)
    kind = DataLoaderDispatcher if dispatch else DataLoaderShard
    assert isinstance(loader, (kind, stateful.StatefulDataLoader))
    states, batches = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    assert batches == [[i, i + 1] for i in range(0, 12, 2)]
    for number in (0, 2, 4):
        again = prepared(dataset, workers, dispatch_batches=dispatch)
        again.load_state_dict(states[number])
        assert [batch.tolist() for batch in again] == batches[number + 1 :]


def test_a_loader_says_whether_it_has_a_state() -> None:
    assert prepared().use_stateful_dataloader
    plain = Accelerator(cpu=True).prepare(DataLoader(range(4)))
    assert not plain.use_stateful_dataloader
    assert plain.gradient_state.sync_gradients


def test_skipping_keeps_the_kind() -> None:
    skipping = skip_first_batches(prepared(), 4)
    assert isinstance(skipping, stateful.StatefulDataLoader)
    assert [batch.tolist() for batch in skipping] == [[8, 9], [10, 11]]


# -- dispatched rounds ---------------------------------------------------------------------------


class Short(IterableDataset):
    """The first worker gives a short last batch long before the second one ends."""

    shards_by_worker = True

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(3) if info.id == 0 else range(10, 21))


def read(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def of_two(dataset: Any, rank: int, collate: Any = None, **arguments: Any) -> Any:
    """Return rank `rank`'s loader of two, which reads in this process."""
    original = DataLoader(dataset, batch_size=2, collate_fn=collate, **arguments)
    return prepare_data_loader(
        original,
        num_processes=2,
        process_index=rank,
        dispatch_batches=True,
        use_stateful_dataloader=True,
    )


def test_a_resumed_stream_gives_what_was_read_and_not_given() -> None:
    context = {"num_workers": 2, "multiprocessing_context": "fork"}
    ranks = []
    for rank in (0, 1):
        loader = of_two(Short(), rank, **context)
        batches, states = [], []
        for batch in loader:
            batches.append(batch.tolist())
            states.append(loader.state_dict())
        ranks.append(batches)
        for number, state in enumerate(states[:-1]):
            again = of_two(Short(), rank, **context)
            again.load_state_dict(state)
            assert read(again) == batches[number + 1 :]
    given = [sample for batches in ranks for batch in batches for sample in batch]
    assert sorted(given) == [*range(3), *range(10, 21)]


# -- skipping ------------------------------------------------------------------------------------


# -- ranks at different batches ------------------------------------------------------------------


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


def with_numbers(kind: str, dispatch: bool | None, stateful: bool) -> tuple[Accelerator, Any]:
    set_seed(3)
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(DataLoader(Numbers(kind), batch_size=2))


def drawn(batches: Any) -> list[int]:
    """Return what is drawn, while a model draws, too."""
    found = []
    for batch in batches:
        found += batch.tolist()
        torch.rand(1), random.random(), np.random.rand()
    return found


def check(folder: str, kind: str, dispatch: bool | None, stateful: bool) -> list[str]:
    """Return what is wrong in three epochs that are resumed in the second and before the third."""
    accelerator, loader = with_numbers(kind, dispatch, stateful)
    first = drawn(loader)
    batches = iter(loader)
    begun = drawn(next(batches) for _ in range(2))
    accelerator.save_state(f"{folder}/within")
    rest = drawn(batches)
    accelerator.save_state(f"{folder}/between")
    third = drawn(loader)
    accelerator.free_memory()

    wrong = []
    accelerator, loader = with_numbers(kind, dispatch, stateful)
    accelerator.load_state(f"{folder}/within")
    resumed = drawn(loader if stateful else accelerator.skip_first_batches(loader, 2))
    if resumed != rest:
        wrong.append(f"within: {begun} and then {resumed}, not {rest}")
    accelerator.free_memory()
    accelerator, loader = with_numbers(kind, dispatch, stateful)
    accelerator.load_state(f"{folder}/between")
    resumed = drawn(loader)
    if resumed != third or third == first:
        wrong.append(f"between: {resumed}, not {third}, after {first}")
    accelerator.end_training()
    return wrong


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("kind", ["buffered", *slow("own", "torch", "numpy", "python")])
def test_a_shuffled_stream_goes_on_two_processes(
    kind: str, dispatch: bool | None, stateful: bool, tmp_path: Path
) -> None:
    assert run_distributed(check, 2, str(tmp_path), kind, dispatch, stateful) == [[], []]
