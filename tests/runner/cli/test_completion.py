"""Completion: what a shell is told, and that it is never told an error (E6)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner import cli
from runner.cli.completion import candidates


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in a folder with one run, and leave the module search path alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = tmp_path / "runs" / "digits" / "20260101-120000-aaaa"
    (run / "sessions").mkdir(parents=True)


RUN = "runs/digits/20260101-120000-aaaa"
LINES = {
    "runner ev": ["eval"],
    "runner eval ": [RUN],
    "runner eval runs/di": [RUN],
    "runner resume=": ["resume=auto", f"resume={RUN}"],
    "runner --mul": ["--multirun"],
    "runner seed=1 trainer.log": ["trainer.log_every="],
    "runner -m precision=b": ["precision=bf16", "precision=bf16_weights"],
    "runner -m hydra/sweeper=o": ["hydra/sweeper=optuna"],
    "runner factories s": ["schedules", "steps"],
    "runner factories schedules co": ["constant", "cosine"],
    "runner data s": ["show"],
    "runner data show trainer.log": ["trainer.log_every="],
    "runner lr-find trainer.log": ["trainer.log_every="],
    "runner batch": ["batch-size-find"],
    "runner sub": ["submit", "submit.", "submit="],
    "runner model=byte_gpt model.num": ["model.num_heads=", "model.num_layers="],
    "python -m runner trainer.drop_last=": ["trainer.drop_last=false"],
    "runner 'trai": [],
    "runner precision=nope optimizer.weight": [],
}


@pytest.mark.parametrize("line", LINES)
def test_the_last_word_is_completed(line: str) -> None:
    assert candidates(line) == LINES[line]


def test_a_damaged_project_tells_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.runner]\nimports = ["not_there_at_all"]\n')
    overlay = tmp_path / "conf" / "model" / "own.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_bytes(b"name: \xe9\n  bad: [\n")
    for shell, line in (("bash", "runner model=own model."), ("fish", "runner trainer.ep")):
        monkeypatch.setenv("COMP_LINE", line)
        assert cli.main(["-sc", f"query={shell}"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "Error" not in out
    assert out == "trainer.epochs=\n"
