"""Batches that one process reads for all."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel.data.prepare import prepare_data_loader
from accel.machine.errors import StateError
from accel.state import PartialState
from tests.helpers import run_distributed


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
