"""A search goes on where its directory has been moved to."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from runner.run_dir import study as study_files
from runner.sweep.job_errors import JobStopped
from runner.sweep.journal import Journal
from runner.training import optuna_study
from tests.helpers import python
from tests.runner.sweep.kills import ROOT, START_SECONDS, descendants, require_ended
from tests.runner.sweep.test_optuna_sweeper import QUICK, journaled, search, study_of


def test_a_sweep_directory_that_was_moved_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"

    def stopping(number: int, given: dict[str, str]) -> float:
        if number == 2:
            overrides = [f"{key}={value}" for key, value in given.items()]
            Journal(here).started(number, overrides)
            raise JobStopped("job 0002 was stopped")
        return journaled(here)(number, given)

    assert search(here, stopping).batches == [[0], [1], [2]]
    begun = study_of(here).trials
    here.rename(there)
    assert search(there, journaled(there)).batches == [[2], [3], [4], [5]]
    shown = capsys.readouterr().out
    assert "rebuilt" not in shown
    assert "The study goes on: 2 of 6 trials have ended." in shown
    trials = study_of(there).trials
    assert [trial.params for trial in trials[:3]] == [trial.params for trial in begun]
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 6
    there.rename(here)
    assert search(here, journaled(here)).batches == []
    assert "rebuilt" not in capsys.readouterr().out
    assert len(study_of(here).trials) == 6


@pytest.mark.slow
def test_a_run_of_a_sweep_that_was_moved_reports_to_its_trial(tmp_path: Path) -> None:
    kept = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = (
        *("hydra/sweeper=random", "optimizer.lr=tag(log,interval(1e-6,1e-1))", *QUICK),
        *("hydra.sweeper.pruner=median", "hydra.sweeper.n_trials=2", "trainer.max_steps=400"),
    )

    def command(folder: str) -> list[str]:
        return python("-m", "runner", "-m", *line, f"sweep.dir={folder}")

    started = subprocess.Popen(command("here"), cwd=tmp_path, env=kept)
    journal, deadline = tmp_path / "here" / study_files.JOURNAL, time.monotonic() + START_SECONDS
    while not journal.exists() or "intermediate_value" not in journal.read_text():
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    below = descendants(started.pid)
    started.kill()
    started.wait(60)
    require_ended(below)
    before = study_of(tmp_path / "here").trials
    (tmp_path / "here").rename(tmp_path / "there")
    shown = subprocess.check_output(
        command("there"), cwd=tmp_path, env=kept, text=True, timeout=240
    )
    assert "rebuilt" not in shown
    trials = study_of(tmp_path / "there").trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2
    assert trials[0].params == before[0].params
    assert len(trials[0].intermediate_values) == 80
    assert before[0].intermediate_values.items() <= trials[0].intermediate_values.items()


def test_a_search_that_was_moved_goes_on_in_a_shared_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name, count in (("a", None, 3), ("b", "s", 3), ("c", "s", 2)):
        (tmp_path / folder).mkdir()
        shared = {"storage": "shared.journal", "study_name": name, "n_trials": count}
        here, there = tmp_path / folder / "opt", tmp_path / folder / "moved"
        assert search(here, journaled(here), **shared).batches == [[n] for n in range(count)]
        here.rename(there)
        more = {**shared, "n_trials": count + 1}
        assert search(there, journaled(there), **more).batches == [[count]]
    assert "rebuilt" not in capsys.readouterr().out
    storage = optuna_study.storage_of("shared.journal", tmp_path)
    trials = {one.study_name: one.n_trials for one in optuna.get_all_study_summaries(storage)}
    assert (trials.pop("s"), list(trials.values())) == (7, [4])  # "a" has a study of its own


def test_a_search_whose_file_was_lost_keeps_its_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tmp_path, journaled(tmp_path)).batches == [[n] for n in range(6)]
    (tmp_path / study_files.FILE).unlink()
    assert search(tmp_path, journaled(tmp_path)).batches == []
    assert "rebuilt" not in capsys.readouterr().out
    assert len(study_of(tmp_path).trials) == 6
