"""E2: a pass over a stream that is resumed, more than once, is the rest of that pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel import Accelerator, DataLoaderConfiguration
from tests.helpers import run_distributed

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

SAMPLES = 40


class Stream(IterableDataset[int]):
    """Numbers, divided among the workers that read them; `Placed` ones know their position."""

    shards_by_worker = True

    def __init__(self) -> None:
        self.at = 0

    def numbers(self) -> range:
        worker = get_worker_info()
        return range(SAMPLES) if worker is None else range(worker.id, SAMPLES, worker.num_workers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers())


class Placed(Stream):
    def __iter__(self) -> Iterator[int]:
        numbers = self.numbers()
        while self.at < len(numbers):
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


KINDS: dict[str, Any] = {"stream": Stream, "placed": Placed, "map": lambda: range(SAMPLES)}


def engine(kind: str, workers: int, dispatch: bool | None) -> tuple[Accelerator, Any]:
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    context = "fork" if workers else None
    loader = DataLoader(
        KINDS[kind](), batch_size=3, num_workers=workers, multiprocessing_context=context
    )
    return accelerator, accelerator.prepare(loader)


def resumed_twice(kind: str, workers: int, dispatch: bool | None, folder: str) -> Any:
    """Return the batches of a pass, and those of one that is saved and loaded at 2 and at 5."""
    accelerator, loader = engine(kind, workers, dispatch)
    straight = [[batch.tolist() for batch in loader] for _ in range(2)]
    found: list[Any] = []
    for stop in (2, 3, 100):
        accelerator.free_memory()
        accelerator, loader = engine(kind, workers, dispatch)
        if stop != 2:
            accelerator.load_state(folder)
        for number, batch in enumerate(loader, start=1):
            found.append(batch.tolist())
            if number == stop:
                accelerator.save_state(folder)
                break
    following = [batch.tolist() for batch in loader]
    accelerator.free_memory()
    return straight, [found, following]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_resumed_twice(kind: str, workers: int, tmp_path: Path) -> None:
    straight, found = resumed_twice(kind, workers, None, str(tmp_path))
    assert found == straight


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_resumed_twice_on_two_processes(
    kind: str, dispatch: bool, workers: int, tmp_path: Path
) -> None:
    given = kind, workers, dispatch, str(tmp_path)
    for straight, found in run_distributed(resumed_twice, 2, *given):
        assert found == straight


def test_a_state_has_the_keys_of_torchdata() -> None:
    """E1."""
    for kind in KINDS:
        plain = StatefulDataLoader(KINDS[kind](), batch_size=3)
        _, loader = engine(kind, 0, None)
        for one in (plain, loader):
            next(batches := iter(one)), next(batches)
        assert plain.state_dict().keys() <= loader.state_dict().keys()
        assert loader.state_dict()["_num_yielded"] == plain.state_dict()["_num_yielded"] == 2


# -- Hugging Face data sets with shards of their own ---------------------------------------------


def of_shards(files: list[int]) -> Iterator[dict[str, int]]:
    for file in files:
        yield from ({"id": 10 * file + row} for row in range(4))


def own_shards(num_shards: int, even: bool) -> list[list[int]]:
    datasets = pytest.importorskip("datasets")
    data = datasets.IterableDataset.from_generator(
        of_shards, gen_kwargs={"files": list(range(num_shards))}
    )
    config = DataLoaderConfiguration(dispatch_batches=False, even_batches=even)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    passes = []
    for _ in range(2):
        read, gathered = [], []
        for batch in loader:
            read += batch["id"].tolist()
            gathered += accelerator.gather_for_metrics(batch["id"]).tolist()
        passes += [read, sorted(gathered)]
    return passes


def test_each_process_reads_its_own_shards() -> None:
    first, second = run_distributed(own_shards, 2, 4, False)
    assert {number // 10 for number in first[0]}.isdisjoint(number // 10 for number in second[0])
    whole = sorted(first[0] + second[0])
    assert len(whole) == 16
    assert first == [first[0], whole, first[0], whole]
    assert second[1] == whole


def test_fewer_shards_than_processes_are_read_by_all() -> None:
    first, second = run_distributed(own_shards, 2, 1, True)
    assert sorted(first[0] + second[0]) == first[1] == [0, 1, 2, 3]
