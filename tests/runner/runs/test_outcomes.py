"""How each process ended, in a file of its own (R9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.checkpoint import directory as checkpoints
from runner.runs import outcomes
from runner.runs.outcomes import Outcome


def test_outcomes_are_read_earliest_first(tmp_path: Path) -> None:
    Outcome(0, 5.0, 1, "later").write(tmp_path)
    Outcome(1, 4.0, 1, "earlier").write(tmp_path)
    assert [found.message for found in outcomes.read_outcomes(tmp_path)] == ["earlier", "later"]


def test_a_full_disk_is_no_second_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.os, "urandom", lambda size: bytes(range(size)))
    (tmp_path / ".rank_0.json.partial-00010203").symlink_to("/dev/full")
    assert not Outcome(0, 1.0, 1, "no room").write(tmp_path)
    assert outcomes.read_outcomes(tmp_path) == []


def test_a_rank_that_ends_late_makes_no_directory(tmp_path: Path) -> None:
    Outcome(1, 0.0, 2, "no").write(tmp_path / "removed")
    assert not (tmp_path / "removed").exists()
