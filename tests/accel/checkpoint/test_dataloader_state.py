"""The positions of stateful data loaders in a checkpoint."""

from __future__ import annotations

import pytest

from accel.checkpoint.loaders import load_positions, positions
from accel.comm.local import LocalCommunicator
from accel.machine.errors import CheckpointError


class Stateful:
    """Stands for a loader that knows its position."""

    def __init__(self) -> None:
        self.loaded: object = None

    def state_dict(self) -> dict[str, int]:
        return {"read": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def test_only_loaders_that_know_their_position_have_one() -> None:
    loaders = [[], Stateful()]
    saved = positions(loaders)
    assert saved == [None, {"read": 3}]
    load_positions(LocalCommunicator(), loaders, saved)
    assert loaders[1].loaded == {"read": 3}


@pytest.mark.parametrize("saved", [[], [None]])
def test_a_position_that_was_not_saved_is_missed(saved: list[None]) -> None:
    with pytest.raises(CheckpointError, match=r"data loader 0.*no position of it on rank 0"):
        load_positions(LocalCommunicator(), [Stateful()], saved)
