"""E2: loaders take the saved states that are theirs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.checkpoint.loaders import load_positions
from accel.comm.local import LocalCommunicator
from accel.machine.errors import CheckpointError
from tests.accel.checkpoint.parts import build


def orders(*loaders: Any) -> list[list[int]]:
    return [[int(n) for batch in loader for n in batch] for loader in loaders]


def shuffled(length: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(length), batch_size=4, shuffle=True)


@pytest.mark.parametrize("lengths", [(9, 12, 20), (12, 20, 9), (12, 9, 20), (20,), (20, 12)])
def test_loaders_are_recognised_among_more_and_fewer(
    tmp_path: Path, lengths: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The saved run has loaders over 12 and 20 samples, read once; one over 9 is new."""
    run = build()
    saved = {length: run.accelerator.prepare(shuffled(length)) for length in (12, 20)}
    orders(*saved.values())
    run.accelerator.save_state(tmp_path)
    expected = dict(zip(saved, orders(*saved.values()), strict=True))
    other = build(seed=5)
    fresh = {length: other.accelerator.prepare(shuffled(length)) for length in lengths}
    with caplog.at_level(logging.WARNING):
        other.accelerator.load_state(tmp_path)
    for length, order in zip(fresh, orders(*fresh.values()), strict=True):
        assert order == expected.get(length, order), length
    assert ("holds no state of data loader" in caplog.text) == (9 in lengths)


class Stateful:
    """Stands for a loader that knows its position."""

    def __init__(self) -> None:
        self.loaded: object = None

    def state_dict(self) -> dict[str, int]:
        return {"read": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


@pytest.mark.parametrize("saved", [[], [None]])
def test_a_position_that_was_not_saved_is_missed(saved: list[None]) -> None:
    with pytest.raises(CheckpointError, match=r"data loader 0.*no position of it on rank 0"):
        load_positions(LocalCommunicator(), [Stateful()], saved)
