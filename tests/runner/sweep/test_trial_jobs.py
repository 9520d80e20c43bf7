"""S1, S4: no job of a study is lost and none is run twice, whoever is killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from runner.recipe import hydra_setup, sweepers
from runner.runs import sessions
from runner.runs import study as study_files
from runner.sweep.search_space import Space
from runner.sweep.study_settings import Settings
from runner.sweep.trial_jobs import COMMANDS, Jobs, TrialJob
from runner.training import optuna_study
from tests.helpers import python
from tests.runner.written_runs import write_run

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.runner.sweep.test_trial_jobs import jobs_in
jobs = jobs_in(Path(sys.argv[1])).__enter__()
jobs.complete(jobs.take(1)[0], [0.5])
print([job.overrides for job in jobs.take(2)], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

SECOND = """
import sys
from pathlib import Path
from tests.runner.sweep.test_trial_jobs import jobs_in, numbers
with jobs_in(Path(sys.argv[1])) as jobs:
    print(numbers(jobs.take(9)))
"""


def jobs_in(folder: Path, **changes: object) -> Jobs:
    folder.mkdir(exist_ok=True)
    with hydra_setup.session():
        space = Space.read(["name=x", "optimizer.lr=interval(0,1)", "seed=range(1,9)"], {}, {})
    settings = Settings.read({**sweepers.DEFAULTS, "n_trials": 6, **changes})
    storage = optuna_study.storage_of(study_files.JOURNAL, folder)
    study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)
    return Jobs(study, storage, settings, space, folder)


def numbers(taken: list[TrialJob]) -> list[int]:
    return [job.number for job in taken]


def test_jobs_are_numbered_until_there_are_enough(tmp_path: Path) -> None:
    with jobs_in(tmp_path) as jobs:
        first = jobs.take(4)
        assert numbers(first) == [0, 1, 2, 3]
        for job in first:
            jobs.complete(job, [job.number / 10])
        assert numbers(jobs.take(4)) == [4, 5]
        assert jobs.take(4) == []
    assert list(tmp_path.glob(f"{COMMANDS}*")) == []


def test_a_second_command_runs_other_jobs(tmp_path: Path) -> None:
    with jobs_in(tmp_path) as first:
        assert numbers(first.take(2)) == [0, 1]
        line = python("-c", SECOND, str(tmp_path))
        assert subprocess.check_output(line, text=True, timeout=120) == "[2, 3, 4, 5]\n"
        assert numbers(first.take(9)) == [2, 3, 4, 5]  # the other one has ended


def test_what_a_killed_command_has_left_goes_on_with_the_same_parameters(tmp_path: Path) -> None:
    ended = subprocess.run(
        python("-c", KILLED, str(tmp_path)), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode < 0, ended.stderr
    with jobs_in(tmp_path) as jobs:
        taken = jobs.take(9)
        assert numbers(taken) == [1, 2, 3, 4, 5]
        assert str([job.overrides for job in taken[:2]]) == ended.stdout.strip()
        for job in taken:
            jobs.complete(job, [0.1])
    assert len(jobs.study.trials) == 6
    assert {trial.state for trial in jobs.study.trials} == {TrialState.COMPLETE}


def test_a_continued_study_chooses_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    def overrides(folder: str, *parts: int) -> list[tuple[str, ...]]:
        found = []
        for part in parts:
            with jobs_in(tmp_path / folder, sampler={"name": "tpe", "n_startup_trials": 2}) as jobs:
                for _ in range(part):
                    (job,) = jobs.take(1)
                    found.append(job.overrides)
                    jobs.complete(job, [float(job.number % 3)])
        return found

    assert overrides("whole", 6) == overrides("parts", 2, 1, 3)


@pytest.mark.parametrize("sampler", ["random", "qmc", "nsgaii", "cmaes"])
def test_each_sampler_draws_different_jobs(tmp_path: Path, sampler: str) -> None:
    with jobs_in(tmp_path, sampler=sampler, n_trials=5) as jobs:
        seen = set()
        while taken := jobs.take(1):
            seen.add(taken[0].overrides)
            jobs.complete(taken[0], [0.5 + taken[0].number])
    assert len(seen) == 5


def test_a_failed_job_is_tried_again_by_the_next_command_only(tmp_path: Path) -> None:
    with jobs_in(tmp_path, n_trials=2) as jobs:
        (first,), (second,) = jobs.take(1), jobs.take(1)
        jobs.fail(first, "it broke", again=True)
        jobs.fail(second, "not a number", again=False)
        assert jobs.take(1) == []
    with jobs_in(tmp_path, n_trials=2) as jobs:
        (again,) = jobs.take(5)
        assert (again.number, again.overrides) == (0, first.overrides)
        assert again.trial == 2
        jobs.complete(again, [0.5])
    newest = jobs.newest()
    assert [newest[n].state for n in (0, 1)] == [TrialState.COMPLETE, TrialState.FAIL]
    assert newest[1].user_attrs["failure"]["reason"] == "not a number"
    assert newest[0].params == jobs.study.trials[0].params


def test_a_job_that_is_tried_again_keeps_what_its_run_has_reported(tmp_path: Path) -> None:
    with jobs_in(tmp_path) as jobs:
        (job,) = jobs.take(1)
        trial = optuna_study.running_trial(jobs.study, jobs.storage, 0)
        assert trial is not None
        trial.report(0.25, 10)
        trial.set_user_attr("pruned", 10)
        jobs.fail(job, "it was killed", again=True)
    with jobs_in(tmp_path) as jobs:
        (job,) = jobs.take(1)
        assert jobs.newest()[0].intermediate_values == {10: 0.25}
        assert jobs.pruned(job)


def test_a_run_whose_end_was_not_told_in_time_is_pruned_by_its_summary(tmp_path: Path) -> None:
    with jobs_in(tmp_path) as jobs:
        first, second = jobs.take(2)
        for job, stopped in ((first, "pruned"), (second, "max_steps")):
            folder = study_files.job_folder(tmp_path, job.number)
            session = write_run(folder, summary=False) / "sessions" / "0001"
            sessions.end(session, 0, summary={"stopped": stopped})
        assert (jobs.pruned(first), jobs.pruned(second)) == (True, False)


def test_a_trial_that_was_being_asked_for_is_no_job(tmp_path: Path) -> None:
    with jobs_in(tmp_path) as jobs:
        jobs.study.ask()
    with jobs_in(tmp_path) as jobs:
        assert numbers(jobs.take(2)) == [0, 1]
        assert jobs.study.trials[0].state is TrialState.FAIL
