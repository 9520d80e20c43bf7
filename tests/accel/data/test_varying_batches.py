"""Batches whose sizes vary, and whose sampler knows none: rounds, and metrics of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel import Accelerator
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.machine.errors import ConfigError
from accel.state import GradientState
from tests.accel.data.parts import values
from tests.helpers import run_distributed


class Sizes:
    """Batches of consecutive indices, of these sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        for end, size in zip(itertools.accumulate(self.sizes), self.sizes, strict=True):
            yield list(range(end - size, end))


class Batches(IterableDataset[torch.Tensor]):
    """A stream whose items are batches of these sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, iter(Sizes(self.sizes)))


def original(sizes: Sequence[int], streamed: bool) -> DataLoader[Any]:
    if streamed:
        return DataLoader(Batches(sizes), batch_size=None)
    return DataLoader(torch.arange(sum(sizes)), batch_sampler=Sizes(sizes))  # type: ignore[arg-type]


def loaders(
    sizes: Sequence[int], count: int, streamed: bool = False, dispatch: bool = True, **flags: Any
) -> list[Any]:
    """Return the loader of each rank, in this process."""
    return [
        prepare_data_loader(
            original(sizes, streamed),
            num_processes=count,
            process_index=rank,
            dispatch_batches=dispatch,
            **flags,
        )
        for rank in range(count)
    ]


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_a_first_round_of_single_samples_decides_no_size(streamed: bool) -> None:
    (alone,) = loaders((1, 2, 3, 4), 1, streamed)
    every = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert values(alone) == every
    assert values(skip_first_batches(alone, 1)) == every[1:]
    if not streamed:
        assert len(alone) == 4

    pair = loaders((1, 1, 3, 3), 2, streamed)
    assert [values(loader) for loader in pair] == [[[0], [2, 3, 4]], [[1], [5, 6, 7]]]
    rest = [values(skip_first_batches(loader, 1)) for loader in pair]
    assert rest == [[[2, 3, 4]], [[5, 6, 7]]]


def test_a_stream_of_samples_of_length_one_is_dealt_as_before() -> None:
    pair = loaders((1,) * 5, 2, streamed=True)
    assert [values(loader) for loader in pair] == [[[0], [2], [4]], [[1], [3], [0]]]


def test_batches_of_a_known_size_are_as_before() -> None:
    loader = prepare_data_loader(DataLoader(range(5), 1), num_processes=2, dispatch_batches=True)
    assert values(loader) == [[0], [2], [4]]


def test_what_completes_a_round_is_the_same_after_a_skip() -> None:
    pair = loaders((3, 2, 4, 1, 2), 2)
    assert values(pair[1]) == [[3, 4, 0], [8, 9, 0], [11]]
    assert values(skip_first_batches(pair[1], 1)) == [[8, 9, 0], [11]]


class Noisy(Dataset[torch.Tensor]):
    """Numbers with noise, as an augmentation adds it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


def test_what_completes_a_round_after_a_skip_leaves_the_draws_as_they_are() -> None:
    found = []
    for even in (False, True):
        data: Any = DataLoader(Noisy(), batch_sampler=Sizes((3, 2, 4, 1, 2)))  # type: ignore[arg-type]
        loader = prepare_data_loader(
            data, num_processes=2, process_index=0, dispatch_batches=True, even_batches=even
        )
        torch.manual_seed(3)
        found.append(next(iter(skip_first_batches(loader, 1))).tolist())
    assert found[0] == found[1]


# -- splitting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", [False, True])
def test_batches_of_unknown_size_are_not_split(dispatch: bool) -> None:
    with pytest.raises(ConfigError, match=r"Sizes without `batch_size`.*split_batches=False"):
        len(loaders((1, 2), 2, dispatch=dispatch, split_batches=True)[0])
    assert values(loaders((1, 2), 1, dispatch=dispatch, split_batches=True)[0]) == [[0], [1, 2]]


# -- metrics -----------------------------------------------------------------------------------


def gathered(sizes: Sequence[int], dispatch: bool, skipped: int = 0) -> dict[str, list[Any]]:
    """Gather each batch in three ways; tensors are padded to one shape over the ranks."""
    accelerator = Accelerator(cpu=True, dispatch_batches=dispatch)
    loader = accelerator.prepare(original(sizes, streamed=False))
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


def test_repetitions_of_all_rounds_are_counted_for_what_is_gathered_after_the_pass() -> None:
    values(loaders((1, 2, 2, 2, 3, 2, 1), 2)[1])
    assert GradientState().passed == (16, 3)


def after_inner_passes() -> list[int]:
    accelerator = Accelerator(cpu=True, dispatch_batches=True)
    outer, inner = accelerator.prepare(original((1, 2, 1, 1), False), DataLoader(range(16), 2))
    found = []
    for _ in outer:
        rows = torch.cat(list(inner))
        found.append(len(accelerator.gather_for_metrics(rows)))
    accelerator.end_training()
    return found


def test_rows_of_a_pass_within_a_completed_round_are_not_cut_by_it() -> None:
    assert run_distributed(after_inner_passes, 2) == [[16, 16]] * 2
