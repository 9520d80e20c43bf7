"""How each process ended, in a file of its own, and the budget of restarts (R9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.checkpoint import directory as checkpoints
from runner.run_dir import outcomes
from runner.run_dir.outcomes import Outcome


def test_outcomes_are_read_earliest_first_and_of_one_launch(tmp_path: Path) -> None:
    Outcome(0, 5.0, 1, "later").write(tmp_path, "a")
    Outcome(1, 4.0, 1, "earlier").write(tmp_path, "a")
    Outcome(0, 1.0, 1, "another launch").write(tmp_path, "b")
    assert [found.message for found in outcomes.read_outcomes(tmp_path, "a")] == [
        "earlier",
        "later",
    ]


def test_how_a_process_ended_is_told_without_room_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr(outcomes.tempfile, "gettempdir", lambda: str(elsewhere))
    logs = outcomes.log_folder(tmp_path)
    monkeypatch.setattr(checkpoints.os, "urandom", lambda size: bytes(range(size)))
    (logs / ".launch_x_rank_0.json.partial-00010203").symlink_to("/dev/full")
    Outcome(0, 1.0, 1, "no room").write(tmp_path, "launch_x")
    assert [found.message for found in outcomes.read_outcomes(tmp_path, "launch_x")] == ["no room"]
    assert list(elsewhere.iterdir()) == []
