"""E2: each sample of a sharded stream comes once, and a resumed pass is the rest of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel import Accelerator, DataLoaderConfiguration
from accel.data.prepare import prepare_data_loader
from accel.data.stream import IterableDatasetShard
from accel.machine.imports import is_available
from tests.accel.data.parts import Stream, values
from tests.helpers import run_distributed


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


@settings(max_examples=300)
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 8), st.booleans(), st.booleans())
def test_shares_are_whole_batches_and_hold_every_sample(
    n: int, size: int, count: int, split: bool, drop_last: bool
) -> None:
    piece = size
    size = size * count if split else size
    made = [
        IterableDatasetShard(Sized(n), size, drop_last, count, rank, split) for rank in range(count)
    ]
    found = [list(shard) for shard in made]
    assert [len(shard) for shard in made] == [len(samples) for samples in found]
    assert all(len(samples) % piece == 0 for samples in found)
    rounds = len(found[0]) // piece
    seen = [
        sample
        for r in range(rounds)
        for samples in found
        for sample in samples[r * piece : (r + 1) * piece]
    ]
    total = piece * count
    wanted = n // total * total if drop_last else -(-n // total) * total
    assert seen == list(itertools.islice(itertools.cycle(range(n or 1)), wanted))
    assert {shard.remainder for shard in made} == {0 if drop_last else n % total}


def test_the_documented_example() -> None:
    def share(rank: int, split: bool) -> list[int]:
        return list(IterableDatasetShard(Stream(8), 4, False, 2, rank, split))

    assert [share(0, False), share(1, False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [share(0, True), share(1, True)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_short_last_round_is_left_out_or_completed() -> None:
    assert list(IterableDatasetShard(Stream(9), 2, True, 2, 1)) == [2, 3, 6, 7]
    assert list(IterableDatasetShard(Stream(9), 2, False, 2, 1)) == [2, 3, 6, 7, 1, 2]


def test_the_epoch_reaches_the_stream() -> None:
    stream = Stream(3)
    shard = IterableDatasetShard(stream, 1, False, 2, 0)
    shard.set_epoch(4)
    assert stream.epoch == 4


SIZE = 4


class Parts(IterableDataset[int]):
    """The numbers below `length`, of which each worker reads one of `parts`, or several."""

    shards_by_worker = True

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        starts = [0, *itertools.accumulate(self.lengths)]
        info = get_worker_info()
        mine = slice(None) if info is None else slice(info.id, None, info.num_workers)
        for start, length in list(zip(starts, self.lengths, strict=False))[mine]:
            yield from range(start, start + length)


class SizedParts(Parts):
    def __len__(self) -> int:
        return sum(self.lengths)


def loaders(lengths: list[int], workers: int, count: int = 2, **flags: Any) -> list[Any]:
    """Return the loader of each rank, in this process."""
    arguments = {name: flags.pop(name) for name in ("drop_last", "collate_fn") if name in flags}
    size = flags.pop("batch_size", SIZE)
    return [
        prepare_data_loader(
            DataLoader(SizedParts(lengths), size, num_workers=workers, **arguments),
            num_processes=count,
            process_index=rank,
            dispatch_batches=False,
            **flags,
        )
        for rank in range(count)
    ]


def flat(found: list[list[list[int]]]) -> list[int]:
    return [sample for batches in found for batch in batches for sample in batch]


LENGTHS = [[11, 12], [3, 30], [30, 3], [1, 0], [8, 16]]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_an_uneven_pass_gives_each_sample_once(lengths: list[int]) -> None:
    found = [values(loader) for loader in loaders(lengths, 2, even_batches=False)]
    assert sorted(flat(found)) == list(range(sum(lengths)))


# -- processes -----------------------------------------------------------------------------------


def gathered(sizes: list[list[int]], workers: int) -> list[Any]:
    """Return for each stream what `gather_for_metrics` returns, and the steps of this rank."""
    config = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    found = []
    for lengths in sizes:
        loader = accelerator.prepare(DataLoader(Parts(lengths), SIZE, num_workers=workers))
        steps = 0
        seen: list[int] = []
        for batch in loader:
            steps += 1
            seen += accelerator.gather_for_metrics(batch).tolist()
        found.append((sorted(seen), steps))
    accelerator.end_training()
    return found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_gathered_evaluation_has_each_sample_once(workers: int) -> None:
    sizes = [[11, 12], [20, 21], [3, 30], [1, 0]]
    wanted = [(list(range(sum(one))), -(-sum(one) // (2 * SIZE))) for one in sizes]
    assert run_distributed(gathered, 2, sizes, workers) == [wanted, wanted]


# -- Hugging Face data sets with shards of their own ---------------------------------------------


class Divided(IterableDataset[int]):
    """Numbers, divided among the workers that read them; `Placed` ones know their position."""

    shards_by_worker = True

    def __init__(self) -> None:
        self.at = 0

    def numbers(self) -> range:
        worker = get_worker_info()
        return range(SAMPLES) if worker is None else range(worker.id, SAMPLES, worker.num_workers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers())


class Placed(Divided):
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


KINDS: dict[str, Any] = {"stream": Divided, "placed": Placed, "map": lambda: range(SAMPLES)}


SAMPLES = 40


needs_torchdata = pytest.mark.skipif(
    not is_available("torchdata"), reason="needs torchdata (extra stateful)"
)


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


@needs_torchdata
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_resumed_twice_on_two_processes(
    kind: str, dispatch: bool, workers: int, tmp_path: Path
) -> None:
    given = kind, workers, dispatch, str(tmp_path)
    for straight, found in run_distributed(resumed_twice, 2, *given):
        assert found == straight


def of_shards(files: list[int]) -> Iterator[dict[str, int]]:
    for file in files:
        yield from ({"id": 10 * file + row} for row in range(4))


def own_shards(num_shards: int, even: bool) -> list[list[int]]:
    import datasets

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


@pytest.mark.slow
def test_each_process_reads_its_own_shards() -> None:
    pytest.importorskip("datasets", reason="datasets is not installed (extra: libraries)")
    first, second = run_distributed(own_shards, 2, 4, False)
    assert {number // 10 for number in first[0]}.isdisjoint(number // 10 for number in second[0])
    whole = sorted(first[0] + second[0])
    assert len(whole) == 16
    assert first == [first[0], whole, first[0], whole]
    assert second[1] == whole
