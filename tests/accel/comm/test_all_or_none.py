"""Phases that all ranks go through together (R4, R9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.comm.base import decided, together
from accel.comm.connect import connect
from accel.comm.local import LocalCommunicator
from accel.machine.errors import CheckpointError, DiskFullError
from tests.accel.comm.test_torch import plan
from tests.helpers import run_distributed


def test_one_process_raises_its_own_error() -> None:
    comm = LocalCommunicator()
    with together(comm, "saving"):
        done = True
    assert done
    with pytest.raises(DiskFullError, match=r"^no room$"), together(comm, "saving"):
        raise DiskFullError("no room")
    with pytest.raises(CheckpointError, match="saving failed: OSError: disk") as caught:
        with together(comm, "saving"):
            raise OSError("disk")
    assert isinstance(caught.value.__cause__, OSError)


def test_the_decision_of_one_process_is_a_path() -> None:
    comm = LocalCommunicator()
    assert decided(comm, lambda: "x/y", "looking") == Path("x/y")
    assert decided(comm, lambda: None, "looking") is None


FAILURES: list[tuple[set[int], Exception]] = [
    ({1}, OSError("disk")),
    ({0, 1}, DiskFullError("no room")),
    (set(), ValueError("raised by none")),
]


def phases() -> list[str]:
    """Return how each phase ended on this rank."""
    comm = connect(plan())
    ends = []
    for failing, error in FAILURES:
        try:
            with together(comm, "saving"):
                if comm.rank in failing:
                    raise error
            ends.append("done")
        except CheckpointError as raised:
            ends.append(f"{type(raised).__name__}: {raised}")
    ends.append(str(decided(comm, lambda: f"of {comm.rank}", "looking")))
    comm.close()
    return ends


def test_a_failure_on_one_rank_raises_on_all() -> None:
    for one, both, none, path in run_distributed(phases, 2):
        assert one == "CheckpointError: saving failed on 1 of 2 ranks. rank 1: OSError: disk"
        assert both.startswith("DiskFullError: saving failed on 2 of 2 ranks. rank 0: no room")
        assert (none, path) == ("done", "of 0")
