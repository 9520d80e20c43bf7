"""A run that begins anew keeps what earlier attempts have left."""

from __future__ import annotations

from pathlib import Path

from runner.run_dir import previous_attempts


def test_files_are_moved_and_logs_stay(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("said")
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    for attempt in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"{attempt}")
        previous_attempts.set_aside(tmp_path)
        kept = tmp_path / "logs" / f"attempt_{attempt}" / "metrics.jsonl"
        assert kept.read_text() == f"{attempt}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "logs"]
    assert (tmp_path / "logs" / "rank_1.log").read_text() == "said"


def test_where_nothing_is_left_nothing_is_made(tmp_path: Path) -> None:
    previous_attempts.set_aside(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_job_that_was_frozen_and_never_started_stays(tmp_path: Path) -> None:
    frozen = ["config.yaml", "environment.json", "job.json", "overrides.yaml"]
    for name in (*frozen, "slurm.json", "submit.sh"):
        (tmp_path / name).touch()
    previous_attempts.set_aside(tmp_path)
    assert not (tmp_path / "logs").exists()
    (tmp_path / "metrics.jsonl").touch()
    previous_attempts.set_aside(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["logs", "slurm.json", "submit.sh"]
