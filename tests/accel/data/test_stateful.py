"""E2: stateful loaders continue after the batch in hand."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from accel import Accelerator, DataLoaderConfiguration
from accel.data.loaders import DataLoaderDispatcher, DataLoaderShard
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.state import AcceleratorState, GradientState
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


class Counted(IterableDataset):
    """The numbers below 11; knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 11:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


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


def named(samples: list[int]) -> dict[str, Any]:
    return {"id": torch.tensor(samples), "name": [str(s) for s in samples], "kind": "numbers"}


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


class Eleven(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


@pytest.mark.parametrize("kind", [Eleven, Counted])
@pytest.mark.parametrize("collate", [None, named])
def test_a_resumed_stream_completes_its_last_round_with_the_first_samples(kind, collate) -> None:
    loader = of_two(kind(), 1, collate)
    batches, states = [], []
    for batch in loader:
        batches.append(plain(batch))
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    last = batches[-1]["id"] if collate else batches[-1]
    assert (len(batches), last) == (3, [10, 0])
    for number, state in enumerate(states):
        again = of_two(kind(), 1, collate)
        again.load_state_dict(state)
        assert read(again) == (batches[number + 1 :] or batches)
        assert read(again) == batches  # and the next pass is whole


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


@pytest.mark.parametrize("dataset", [range(12), Stream(), Counted()])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
def test_the_original_knows_where_a_skipping_copy_is(dataset, workers: int, dispatch: bool) -> None:
    def new() -> Any:
        return prepared(dataset, workers, dispatch_batches=dispatch)

    whole = read(new())
    loader = new()
    skipping = skip_first_batches(skip_first_batches(loader, 1), 1)
    passing = iter(skipping)
    assert [next(passing).tolist() for _ in range(2)] == whole[2:4]
    states = loader.state_dict(), skipping.state_dict()
    passing.close()
    for state in states:
        again = new()
        again.load_state_dict(state)
        assert read(again) == whole[4:]
        assert read(again) == whole
        skipping = skip_first_batches(new(), 2)
        skipping.load_state_dict(state)
        assert read(skipping) == whole[4:]


@pytest.mark.parametrize("dataset", [range(12), Stream()])
def test_skipping_takes_the_place_of_a_loaded_position(dataset) -> None:
    loader = prepared(dataset)
    next(iter(loader))
    state = loader.state_dict()
    again = prepared(dataset)
    again.load_state_dict(state)
    assert read(skip_first_batches(again, 1)) == [[i, i + 1] for i in range(2, 12, 2)]
    assert read(again) == [[i, i + 1] for i in range(0, 12, 2)]


# -- ranks at different batches ------------------------------------------------------------------


class Drawing(Sampler[int]):
    """Draws each index when it is wanted."""

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        left = list(range(13))
        while left:
            yield left.pop(random.randrange(len(left)))


def engine(kind: str, seed: int) -> tuple[Accelerator, Any]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, even_batches=False, dispatch_batches=False
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(seed)
    random.seed(seed)
    if kind == "stream":
        return accelerator, accelerator.prepare(DataLoader(Eleven(), batch_size=2))
    flags = {"shuffle": True} if kind == "random" else {"sampler": Drawing()}
    return accelerator, accelerator.prepare(DataLoader(range(13), batch_size=2, **flags))


def apart(kind: str, stops: list[int], folder: str) -> tuple[Any, Any]:
    """Save after as many batches as `stops` says for each rank; all that it reads otherwise."""
    accelerator, loader = engine(kind, 1)
    stop = stops[accelerator.process_index]
    straight, number = [read(loader)], 0
    straight.append([])
    for number, batch in enumerate(loader, start=1):
        straight[1].append(batch.tolist())
        if number == stop:
            accelerator.save_state(folder)
    if stop > number:
        accelerator.save_state(folder)
    straight += [read(loader), read(loader)]
    accelerator, loader = engine(kind, 2)
    accelerator.load_state(folder)
    return [straight[1][stop:], *straight[2:]], [read(loader) for _ in range(3)]


# Thirteen samples in batches of two: four for rank 0, three for rank 1; 11 of the stream: three.
STOPS = ([1, 3], [3, 3], [3, 9], [2, 1])
FAST_STOPS = (("random", [1, 3]), ("lazy", [2, 1]), ("stream", [3, 9]), ("stream", [3, 3]))


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        pytest.param(*pair, marks=() if pair in FAST_STOPS else pytest.mark.slow)
        for pair in itertools.product(("random", "lazy", "stream"), STOPS)
    ],
)
def test_ranks_that_saved_at_different_batches_go_on_where_they_were(kind, stops, tmp_path) -> None:
    if kind == "stream" and stops[0] == 3:  # its last batch
        stops = [2, stops[1]]
    for wanted, found in run_distributed(apart, 2, kind, stops, str(tmp_path / "state")):
        assert found == wanted


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
