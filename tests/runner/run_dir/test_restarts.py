"""The record of attempts that failed."""

from __future__ import annotations

from pathlib import Path

from runner.run_dir import restarts
from runner.run_dir.outcomes import Outcome


def test_the_budget_is_of_the_whole_run(tmp_path: Path) -> None:
    assert restarts.read(tmp_path) == []
    assert restarts.used(tmp_path) == 0
    cause = Outcome(1, 5.0, 1, "its process was ended by SIGKILL")
    assert restarts.note(tmp_path, cause, 4, restarted=True).attempt == 1
    assert restarts.note(tmp_path, cause, 2, restarted=False).attempt == 2
    assert restarts.used(tmp_path) == 1
    first, second = restarts.read(tmp_path)
    assert (first.rank, first.message, first.num_processes) == (1, cause.message, 4)
    assert (second.num_processes, second.restarted) == (2, False)
