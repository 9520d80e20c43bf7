"""E2: one process reads for all; batches are cut where they have one entry per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.data.prepare import prepare_data_loader
from accel.machine.errors import ConfigError, StateError
from accel.state import PartialState
from tests.accel.data.test_distributed_loaders import Numbers
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
        DataLoader(Numbers(length), batch_size=size, collate_fn=collate),
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
