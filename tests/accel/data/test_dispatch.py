"""E2: one process reads for all; batches are cut where they have one entry per sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator
from accel.data.prepare import prepare_data_loader
from accel.machine.errors import ConfigError, StateError
from accel.state import PartialState
from tests.accel.data.parts import Stream
from tests.helpers import run_distributed


def mixed(samples: list[int]) -> dict[str, Any]:
    """Return a batch with constants of every kind between what has one entry per sample."""
    return {
        "size": (224, 320),
        "anchors": torch.arange(9.0),
        "names": [f"n{sample}" for sample in samples],
        "x": torch.tensor(samples),
        "rows": np.array([[sample, -sample] for sample in samples]),
        "texts": np.array([f"n{sample}" for sample in samples]),
        "grid": np.arange(9),
        "nested": [{"boxes": torch.full((sample % 3, 4), sample)} for sample in samples],
        "pair": (torch.tensor(samples) * 2, tuple(samples)),
        "unit": "px",
    }


def words(samples: list[int]) -> list[str]:
    return [f"n{sample}" for sample in samples]


def read_mixed(length: int, batch_size: int, split: bool) -> list[dict[str, Any]]:
    """Return the samples of this process, and check each of its batches."""
    PartialState(cpu=True)
    found = []
    loader = prepare_data_loader(
        DataLoader(range(length), batch_size=batch_size, collate_fn=mixed),
        dispatch_batches=True,
        split_batches=split,
    )
    for batch in loader:
        samples = batch["x"].tolist()
        assert batch["size"] == (224, 320)
        assert torch.equal(batch["anchors"], torch.arange(9.0))
        assert batch["unit"] == "px"
        assert batch["rows"].tolist() == [[n, -n] for n in samples]
        assert batch["texts"].tolist() == words(samples)
        assert batch["grid"].tolist() == list(range(9))
        assert batch["names"] == words(samples)
        assert [len(entry["boxes"]) for entry in batch["nested"]] == [n % 3 for n in samples]
        assert batch["pair"][0].tolist() == [2 * n for n in samples]
        assert batch["pair"][1] == tuple(samples)
        found.append(samples)
    return found


def read_lists(length: int, batch_size: int, split: bool) -> list[list[int]]:
    PartialState(cpu=True)
    found = []
    for collate in (words, list):
        loader = prepare_data_loader(
            DataLoader(range(length), batch_size=batch_size, collate_fn=collate),
            dispatch_batches=True,
            split_batches=split,
        )
        found += [[int(str(entry).lstrip("n")) for entry in batch] for batch in loader]
    return found


def interleaved(shares: list[list[list[int]]]) -> list[int]:
    return [sample for step in zip(*shares, strict=True) for batch in step for sample in batch]


@pytest.mark.parametrize(
    ("count", "length", "size"), [(2, 25, 6), (2, 4, 6), (3, 20, 12), (3, 14, 6)]
)
def test_only_what_has_one_entry_per_sample_is_cut(count: int, length: int, size: int) -> None:
    for split in (False, True):
        seen = interleaved(run_distributed(read_mixed, count, length, size, split))
        assert seen[:length] == list(range(length))
        assert len(seen) - length < count


def test_lists_of_samples_of_any_kind_are_cut() -> None:
    for split in (False, True):
        shares = run_distributed(read_lists, 2, 25, 6, split)
        steps = len(shares[0]) // 2
        for start in range(0, 2 * steps, steps):
            seen = interleaved([share[start : start + steps] for share in shares])
            assert seen[:25] == list(range(25))


# -- what cannot be told, or joined ------------------------------------------------------------


def changing(samples: list[int]) -> dict[str, Any]:
    return {"x": torch.tensor(samples), "first": (samples[0], 0, 0)}


def of_two(samples: list[int]) -> dict[str, Any]:
    return {"size": (224, 320), "x": torch.tensor(samples)}


def padded(samples: list[int]) -> dict[str, Any]:
    return {"ids": torch.zeros(len(samples), 1 + samples[-1], dtype=torch.long)}


def unclear(samples: list[int]) -> dict[str, Any]:
    return {"size": (1, 2, 3), "names": [str(sample) for sample in samples]}


def refusal(collate: Callable[[list[int]], Any], length: int, size: int, split: bool) -> str:
    """Return what the main process says to the batches of a collator."""
    state = PartialState(cpu=True)
    loader = prepare_data_loader(
        DataLoader(Stream(length), batch_size=size, collate_fn=collate),
        dispatch_batches=True,
        split_batches=split,
    )
    with pytest.raises(ConfigError if state.is_main_process else Exception) as caught:
        list(loader)
    return str(caught.value)


REFUSALS = [
    (changing, 8, 4, False, ["entries 'first' (tuple) differ"]),
    (of_two, 5, 2, False, ["1 samples and 2 entries 'size'", "one entry per sample"]),
    (padded, 8, 4, False, ["entries 'ids' have the shapes [4, 4] and [4, 8]", "pad to a fixed"]),
    (padded, 7, 4, True, ["entries 'ids' have the shapes [3, 7] and [1, 4]", "even_batches=False"]),
    (unclear, 2, 4, False, ["lengths [2, 3]"]),
]


@pytest.mark.parametrize(("collate", "length", "size", "split", "told"), REFUSALS)
def test_what_cannot_be_cut_or_joined_is_refused_by_name(
    collate: Callable[[list[int]], Any], length: int, size: int, split: bool, told: list[str]
) -> None:
    for message in run_distributed(refusal, 2, collate, length, size, split):
        for part in (*told, f"collate_fn ({collate.__name__})", "dispatch_batches=False"):
            assert part in message


class Failing(IterableDataset):
    def __iter__(self):
        yield 1
        yield 2
        raise OSError("disk")


def failing() -> str:
    PartialState(cpu=True)
    loader = prepare_data_loader(DataLoader(Failing()))
    try:
        list(loader)
    except (OSError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_failure_to_read_reaches_every_rank(count: int) -> None:
    main, *others = run_distributed(failing, count)
    assert main == "OSError: disk"
    for other in others:
        assert "main process failed to read" in other
        assert "OSError: disk" in other


# -- metrics -----------------------------------------------------------------------------------


class Sizes:
    """Batches of consecutive indices, of these sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        for end, size in zip(itertools.accumulate(self.sizes), self.sizes, strict=True):
            yield list(range(end - size, end))


def original(sizes: Sequence[int]) -> DataLoader[Any]:
    return DataLoader(torch.arange(sum(sizes)), batch_sampler=Sizes(sizes))  # type: ignore[arg-type]


def gathered(sizes: Sequence[int], dispatch: bool, skipped: int = 0) -> dict[str, list[Any]]:
    """Gather each batch in three ways; tensors are padded to one shape over the ranks."""
    accelerator = Accelerator(cpu=True, dispatch_batches=dispatch)
    loader = accelerator.prepare(original(sizes))
    found: dict[str, list[Any]] = {"padded": [], "objects": [], "losses": []}
    for batch in accelerator.skip_first_batches(loader, skipped):
        padded = accelerator.pad_across_processes(batch, pad_index=-1)
        found["padded"].append(accelerator.gather_for_metrics(padded).tolist())
        found["objects"].append(accelerator.gather_for_metrics([str(int(n)) for n in batch]))
        found["losses"].append(accelerator.gather_for_metrics(batch.float().mean()).numel())
    left = next(batch for batch in loader if loader.end_of_dataloader)
    padded = accelerator.pad_across_processes(left, pad_index=-1)
    found["left"] = accelerator.gather_for_metrics(padded).tolist()
    accelerator.end_training()
    return found


def rounds(sizes: Sequence[int], count: int) -> list[list[int]]:
    batches = list(Sizes(sizes))
    parts = [batches[at : at + count] for at in range(0, len(batches), count)]
    return [list(itertools.chain.from_iterable(part)) for part in parts]


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_completed_round_in_between_counts_each_sample_once(skipped: int) -> None:
    sizes = (1, 2, 2, 2, 3, 2, 1)
    for found in run_distributed(gathered, 2, sizes, True, skipped):
        every = rounds(sizes, 2)[skipped:]
        assert found["padded"] == every
        assert found["objects"] == [[str(n) for n in some] for some in every]
        assert found["losses"] == [min(2, len(some)) for some in every]
        assert found["left"] == [12]


def test_a_last_round_that_whole_batches_complete_keeps_the_real_ones() -> None:
    sizes = (4, 2, 3, 1, 1)
    for found in run_distributed(gathered, 3, sizes, False):
        first, last = found["padded"]
        assert [n for n in first if n >= 0] == list(range(9))
        assert last == [9, -1, -1, -1, 10, -1, -1, -1]
        assert found["objects"] == [[str(n) for n in some] for some in rounds(sizes, 3)]
        assert found["losses"] == [3, 2]
        assert len(found["left"]) == 12  # rows do not tell whose they are
