"""Run directories that are removed, and those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.exit_codes import REFUSED
from runner.launch import failures, launcher, worker
from runner.recipe.processes import Adopted
from runner.run_dir import abandoned, outcomes
from runner.run_dir.outcomes import Outcome
from tests.runner.run_dir.test_directory import add_checkpoint, new_run
from tests.runner.run_dir.test_shared_folders import add, shared


@pytest.mark.parametrize("is_new", [True, False])
def test_under_a_launcher_only_a_new_run_is_removed(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path)
    folder = run_dir if is_new else run_dir / ".attempt-1"
    monkeypatch.setattr(launcher, "run_here", lambda *given: REFUSED)
    monkeypatch.setattr(worker, "end_process", lambda code: None)
    place = Adopted(**{name: 0 for name in Adopted.__dataclass_fields__})
    assert launcher.run_adopted(folder, place) == REFUSED
    assert run_dir.exists() is not is_new


def test_checkpoints_elsewhere_are_worth_keeping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = new_run(tmp_path, checkpoint=shared(tmp_path))
    add(tmp_path / "all" / "checkpoints", 0, 6, "another")
    failures.print_interrupted(run_dir)
    assert "before the first checkpoint" in capsys.readouterr().err
    assert not abandoned.worth_keeping(run_dir, REFUSED)
    add(tmp_path / "all" / "checkpoints", 1, 6, run_dir.name)
    failures.print_interrupted(run_dir)
    assert "resume=" in capsys.readouterr().err
    assert abandoned.worth_keeping(run_dir, REFUSED)
    inside = new_run(tmp_path, name="inside")
    add_checkpoint(inside / "checkpoints", 0)
    (inside / "config.yaml").unlink()
    (inside / "job.json").unlink()
    assert abandoned.worth_keeping(inside, REFUSED)


def test_a_rank_that_ends_late_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path)
    real = outcomes.log_folder

    def late(folder: Path) -> Path:
        abandoned.remove(run_dir, REFUSED)
        return real(folder)

    monkeypatch.setattr(outcomes, "log_folder", late)
    Outcome(1, 0.0, REFUSED, "no").write(run_dir, "a")
    assert not run_dir.exists()
