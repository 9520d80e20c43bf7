"""What the processes of an `Accelerator` exchange; metrics count every sample once (E2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.state import GradientState
from tests.helpers import run_distributed

THREE = pytest.param(3, marks=pytest.mark.slow)
SIZE = pytest.mark.parametrize("size", [1, 2, THREE])


# -- plain exchanges ---------------------------------------------------------------------------


def exchange() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    own = torch.tensor([rank, 1])
    ragged = torch.full((2, rank + 1), rank)
    pad = accelerator.pad_across_processes
    found = {
        "gather": accelerator.gather({"x": own})["x"].tolist(),
        "reduce": accelerator.reduce(own).tolist(),
        "mean": accelerator.reduce(own, reduction="mean").tolist(),
        "scaled": accelerator.reduce(own.float(), "sum", 0.5).tolist(),
        "pad": pad(ragged.t()).shape[0],
        "pad_dim": list(pad(ragged, dim=1).shape),
        "pad_index": pad(ragged, dim=1, pad_index=-1)[0].tolist(),
        "pad_first": pad(ragged, dim=1, pad_index=-1, pad_first=True)[0].tolist(),
    }
    accelerator.end_training()
    return found


@SIZE
def test_exchanges(size: int) -> None:
    total = sum(range(size))
    for rank, found in enumerate(run_distributed(exchange, size)):
        own, padding = [rank] * (rank + 1), [-1] * (size - rank - 1)
        assert found == {
            "gather": [value for other in range(size) for value in (other, 1)],
            "reduce": [total, size],
            "mean": [total / size, 1.0],
            "scaled": [total / 2, size / 2],
            "pad": size,
            "pad_dim": [2, size],
            "pad_index": own + padding,
            "pad_first": padding + own,
        }


# -- metrics -----------------------------------------------------------------------------------


def evaluate(samples: int, batch_size: int, dispatch: bool) -> dict[str, Any]:
    """Gather what belongs to the samples of a whole pass, in three ways."""
    accelerator = Accelerator(cpu=True, dispatch_batches=dispatch)
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size))
    found: dict[str, list[Any]] = {"tensors": [], "nested": [], "objects": [], "flagged": []}
    for batch in loader:
        assert accelerator.gather_for_metrics(batch.sum()).numel() <= accelerator.num_processes
        found["tensors"] += accelerator.gather_for_metrics(batch).tolist()
        nested = accelerator.gather_for_metrics({"a": (batch, torch.stack([batch, batch], 1))})
        found["nested"] += [nested["a"][0].tolist(), nested["a"][1][:, 1].tolist()]
        found["objects"] += accelerator.gather_for_metrics([str(int(n)) for n in batch])
        rows = [torch.full((int(n),), 1) for n in batch]  # of different lengths
        gathered = accelerator.gather_for_metrics(rows, use_gather_object=True)
        found["flagged"] += [len(row) for row in gathered]
    last = accelerator.gather_for_metrics(batch)
    accelerator.end_training()
    return {**found, "after": len(last)}


@SIZE
@pytest.mark.parametrize(("samples", "batch_size"), [(9, 5), (12, 2), (2, 5)])
@pytest.mark.parametrize("dispatch", [False, True])
def test_each_sample_counts_once(size: int, samples: int, batch_size: int, dispatch: bool) -> None:
    every = list(range(samples))
    for found in run_distributed(evaluate, size, samples, batch_size, dispatch):
        assert found["tensors"] == every
        assert found["objects"] == [str(n) for n in every]
        assert found["flagged"] == every
        halves = found["nested"][::2], found["nested"][1::2]
        assert [[n for part in half for n in part] for half in halves] == [every, every]
        # When the pass is over nothing is cut any more.
        last = samples % (size * batch_size) or size * batch_size
        full = size * (-(-last // size) if dispatch or size == 1 else batch_size)
        assert found["after"] == full


def break_off() -> dict[str, Any]:
    """Leave a pass with its last batch in hand, as an example of the documentation does."""
    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    loader = accelerator.prepare(DataLoader(range(5 * size - 1), batch_size=5))
    batch = next(iter(loader))
    gather = accelerator.gather_for_metrics
    found = {
        "batch": gather(batch).tolist(),
        "prediction": gather(2 * batch).tolist(),
        "text": gather([str(int(n)) for n in batch]),
        "loss": gather(torch.tensor(rank + 0.5)).numel(),
        "longer": gather({"x": torch.zeros(7), "y": batch})["x"].shape[0],
        "object": gather({"rank": str(rank)}),
        "again": len(gather(batch)),
    }
    for _ in accelerator.prepare(DataLoader(range(2 * size), batch_size=1)):
        found["other"] = len(gather(torch.zeros(5)))
        break
    found["forgotten"] = len(gather(torch.zeros(5)))
    accelerator.end_training()
    return found


@SIZE
def test_a_last_batch_in_hand_is_cut_and_nothing_else(size: int) -> None:
    every = list(range(5 * size - 1))
    by_rank = [{"rank": str(rank)} for rank in range(size)]
    for found in run_distributed(break_off, size):
        assert found["batch"] == every
        assert found["prediction"] == [2 * n for n in every]
        assert found["text"] == [str(n) for n in every]
        assert found["loss"] == size
        assert found["longer"] == 7 * size
        assert found["object"] == (by_rank if size > 1 else by_rank[0])
        assert found["again"] == len(every)
        assert found["other"] == found["forgotten"] == 5 * size


def in_the_middle() -> list[int]:
    accelerator = Accelerator(cpu=True)
    outer = accelerator.prepare(DataLoader(range(12), batch_size=3))
    inner = accelerator.prepare(DataLoader(range(7), batch_size=5))
    lengths = []
    for batch in outer:
        for _ in inner:
            pass
        lengths.append(len(accelerator.gather_for_metrics(batch)))
        break
    lengths.append(len(accelerator.gather_for_metrics(batch)))
    state = GradientState()
    lengths.append(len(state.dataloader_references))
    accelerator.end_training()
    return lengths


@SIZE
def test_a_batch_in_the_middle_is_never_cut(size: int) -> None:
    assert run_distributed(in_the_middle, size) == [[3 * size, 3 * size, 1]] * size


def repeated_for_full_batches(samples: int) -> list[float]:
    """Return a loss of each batch, gathered once per sample of a full batch, and after the pass."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=4))
    found: list[float] = []
    for number, batch in enumerate(loader):
        assert len(accelerator.gather_for_metrics(batch.repeat(2))) >= len(batch)
        loss = torch.tensor(float(number)).repeat(4)
        found += accelerator.gather_for_metrics(loss).tolist()
    after = accelerator.gather_for_metrics(loss)
    accelerator.end_training()
    return [len(after), *found]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (11, [0.0] * 4 + [1.0] * 4 + [2.0] * 3),
        (10, [0.0] * 4 + [1.0] * 4 + [2.0] * 2),  # as many rows as two for each of the two
        (8, [0.0] * 4 + [1.0] * 4),
        (3, [0.0] * 4),  # no full batch to tell by
    ],
)
def test_a_loss_repeated_as_for_full_batches_counts_once_per_sample(
    samples: int, expected: list[float]
) -> None:
    assert repeated_for_full_batches(samples) == [4, *expected]


def test_a_single_process_gets_objects_as_they_are() -> None:
    accelerator = Accelerator(cpu=True)
    mixed = {"a": ["x"], "b": torch.ones(1)}
    for given in (mixed, "text", ("a", 1), ["a"]):
        assert accelerator.gather_for_metrics(given) is given
    rows = torch.ones(2)
    assert accelerator.gather_for_metrics(rows, use_gather_object=True) is rows
    accelerator.end_training()


# -- several rows per sample -------------------------------------------------------------------

ROWS = 3


def flattened(samples: int, batch_size: int, dispatch: bool) -> dict[str, Any]:
    """Gather three rows per sample, and a number of rows that belongs to no sample."""
    accelerator = Accelerator(cpu=True, dispatch_batches=dispatch)
    rank = accelerator.process_index
    found: dict[str, Any] = {"tensors": [], "objects": [], "odd": 0, "ragged": 0, "given": 0}
    for batch in accelerator.prepare(DataLoader(torch.arange(samples), batch_size)):
        rows = batch.repeat_interleave(ROWS)
        found["tensors"] += accelerator.gather_for_metrics({"rows": rows})["rows"].tolist()
        found["objects"] += accelerator.gather_for_metrics([str(row) for row in rows.tolist()])
    odd = torch.zeros(ROWS * len(batch) + 1)
    for batch in accelerator.prepare(DataLoader(torch.arange(samples), batch_size)):
        found["odd"] = len(accelerator.gather_for_metrics(odd))
        # As many entries as three per sample over all processes, but not on each of them.
        ragged = [None] * (ROWS * len(batch) + (-1) ** rank * (rank < 2))
        found["ragged"] = len(accelerator.gather_for_metrics(ragged))
        found["given"] = ROWS * len(batch) * accelerator.num_processes
    accelerator.end_training()
    return found


@pytest.mark.parametrize("size", [2, THREE])
@pytest.mark.parametrize(("samples", "batch_size"), [(9, 5), (13, 3), (1, 2)])
@pytest.mark.parametrize("dispatch", [False, True])
def test_each_row_of_a_sample_counts_once(
    size: int, samples: int, batch_size: int, dispatch: bool
) -> None:
    every = [sample for sample in range(samples) for _ in range(ROWS)]
    for found in run_distributed(flattened, size, samples, batch_size, dispatch):
        assert found["tensors"] == every
        assert found["objects"] == [str(sample) for sample in every]
        # Rows that cannot be told apart are all kept; a lone sample has all rows of its process.
        assert found["ragged"] == found["given"]
        if found["given"] > ROWS * size:
            assert found["odd"] == found["given"] + size


def read_together(shape: str, lengths: tuple[int, int], sizes: tuple[int, int]) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(
        *(DataLoader(range(n), batch_size=k) for n, k in zip(lengths, sizes, strict=True))
    )
    found: list[list[int]] = [[], []]
    if shape == "zip":
        for pair in zip(first, second, strict=False):
            for rows, batch in zip(found, pair, strict=True):
                rows += accelerator.gather_for_metrics(batch).tolist()
    else:
        for batch in first:
            found[0] += accelerator.gather_for_metrics(batch).tolist()
            found[1] = [
                row for inner in second for row in accelerator.gather_for_metrics(inner).tolist()
            ]
    accelerator.end_training()
    return [sorted(rows) for rows in found]


@pytest.mark.parametrize(
    ("shape", "lengths", "sizes"),
    [
        ("zip", (10, 10), (4, 4)),
        ("zip", (10, 15), (4, 6)),  # the number of rows tells which
        ("zip", (16, 22), (4, 6)),
        ("nested", (10, 11), (4, 4)),
    ],
)
def test_other_loaders_that_end_together_count_every_sample_once(shape, lengths, sizes) -> None:
    found = run_distributed(read_together, 2, shape, lengths, sizes)[0]
    assert found == [list(range(length)) for length in lengths]
