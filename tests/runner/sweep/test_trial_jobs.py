"""Jobs of a study: none is lost and none is run twice, whoever is killed."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from accel.machine.errors import ConfigError
from runner.recipe import hydra_setup, sweepers
from runner.run_dir import study as study_files
from runner.run_dir.json_files import METRICS
from runner.sweep.journal import Journal
from runner.sweep.search_space import Space
from runner.sweep.study_settings import Settings
from runner.sweep.trial_jobs import COMMANDS, Jobs, TrialJob
from runner.training import optuna_study
from tests.helpers import python

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.runner.sweep.test_trial_jobs import jobs_in
jobs = jobs_in(Path(sys.argv[1])).__enter__()
jobs.complete(jobs.take(1)[0], [0.5])
print([job.overrides for job in jobs.take(2)], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def jobs_in(folder: Path, **changes: object) -> Jobs:
    folder.mkdir(exist_ok=True)
    with hydra_setup.session():
        space = Space.read(["name=x", "optimizer.lr=interval(0,1)", "seed=range(1,9)"], {}, {})
    settings = Settings.read({**sweepers.DEFAULTS, "n_trials": 6, **changes})
    storage = optuna_study.storage_of(study_files.JOURNAL, folder)
    study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)
    return Jobs(study, storage, settings, space, folder, folder.name)


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
    with jobs_in(tmp_path) as first, jobs_in(tmp_path) as second:
        assert numbers(first.take(2)) == [0, 1]
        assert numbers(second.take(4)) == [2, 3, 4, 5]
        assert first.take(2) == second.take(2) == []


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
        trial = optuna_study.running_trial(jobs.study, jobs.storage, tmp_path.name, 0)
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
            folder.mkdir()
            (folder / "summary.json").write_text(f'{{"stopped": "{stopped}"}}')
        assert (jobs.pruned(first), jobs.pruned(second)) == (True, False)


def test_a_trial_that_was_being_asked_for_is_no_job(tmp_path: Path) -> None:
    with jobs_in(tmp_path) as jobs:
        jobs.study.ask()
    with jobs_in(tmp_path) as jobs:
        assert numbers(jobs.take(2)) == [0, 1]
        assert jobs.study.trials[0].state is TrialState.FAIL


def test_a_space_that_is_seen_whole_ends_the_search(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, sampler="bruteforce", n_trials=50)
    with hydra_setup.session():
        jobs.space = Space.read(["seed=1,2,3"], {}, {})
    with jobs:
        while taken := jobs.take(1):
            jobs.complete(taken[0], [1.0])
        assert jobs.exhausted
    assert len(jobs.newest()) == 3


LEAVES = ["name=a,b", "seed=range(1,4)"]


def brute_force_in(folder: Path, **changes: object) -> Jobs:
    """Return the jobs of a search that tries each of six leaves."""
    jobs = jobs_in(folder, **{"sampler": "bruteforce", "n_trials": 50, **changes})
    with hydra_setup.session():
        jobs.space = Space.read(LEAVES, {}, {})
    return jobs


def leaf(jobs: Jobs, job: TrialJob) -> tuple[str, ...]:
    return tuple(jobs.space.chosen(job.overrides).values())


def rest_of(jobs: Jobs, at_once: int) -> list[tuple[str, ...]]:
    """Run what is left, and return the leaves that were visited."""
    found = []
    while taken := jobs.take(at_once):
        found += [leaf(jobs, job) for job in taken]
        for job in taken:
            jobs.complete(job, [1.0])
    return found


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_each_leaf_of_a_space_is_visited_once(tmp_path: Path, at_once: int, strict: bool) -> None:
    sampler = {"name": "bruteforce", "avoid_premature_stop": strict}
    with brute_force_in(tmp_path, sampler=sampler) as jobs:
        visited = rest_of(jobs, at_once)
    assert (len(visited), len(set(visited))) == (6, 6)


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("ended", [2, 5, 6])
def test_a_rebuilt_search_of_all_values_visits_those_that_remain(
    tmp_path: Path, ended: int, seed: int | None, at_once: int
) -> None:
    record, visited = Journal(tmp_path), []
    with brute_force_in(tmp_path, seed=seed) as jobs:
        taken = jobs.take(ended + 1)  # the last one is under way when the command is killed
        for job in taken:
            overrides = [hydra_setup.closed(one) for one in job.overrides]
            begun = record.started(job.number, overrides)
            if job.number < ended:
                record.ended(job.number, begun, overrides, 0, objective=1.0)
                visited.append(leaf(jobs, job))
    known = record.states()
    for _ in range(2):
        (tmp_path / study_files.JOURNAL).unlink()
        with brute_force_in(tmp_path, seed=seed) as jobs:
            assert jobs.rebuild(known, None) == sorted(known)
            assert jobs.rebuild(known, None) == []
            assert {trial.state for trial in jobs.study.trials} <= {
                *(TrialState.COMPLETE, TrialState.RUNNING)
            }
    with brute_force_in(tmp_path, seed=seed) as jobs:
        visited += rest_of(jobs, at_once)
        assert jobs.exhausted
    assert (len(visited), len(set(visited))) == (6, 6)


def test_the_last_leaf_ends_a_search_that_goes_on(tmp_path: Path) -> None:
    with brute_force_in(tmp_path) as jobs:
        for job in jobs.take(6)[:-1]:
            jobs.complete(job, [1.0])
    with brute_force_in(tmp_path) as jobs:
        assert len(rest_of(jobs, 1)) == 1
        assert jobs.exhausted


@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_a_leaf_that_was_being_asked_for_is_visited(tmp_path: Path, drawn: int) -> None:
    with brute_force_in(tmp_path) as jobs:
        (first,) = jobs.take(1)
        jobs.complete(first, [1.0])
        trial = jobs.study.ask()
        for one in jobs.space.parameters[:drawn]:
            one.suggest(trial)
    with brute_force_in(tmp_path) as jobs, brute_force_in(tmp_path) as other:
        visited = [leaf(jobs, first), *rest_of(other, 1), *rest_of(jobs, 1)]
    assert (len(visited), len(set(visited))) == (6, 6)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("at_once", [1, 2])
def test_what_lies_below_a_draw_that_was_cut_off_is_visited(tmp_path: Path, at_once: int) -> None:
    def draw(**values: object) -> optuna.Trial:
        sampler = optuna.samplers.RandomSampler()
        jobs.study.sampler = optuna.samplers.PartialFixedSampler(values, sampler)
        trial = jobs.study.ask()
        for one in jobs.space.parameters[: len(values)]:
            one.suggest(trial)
        return trial

    with brute_force_in(tmp_path) as jobs:
        begun = [draw(name="a", seed=seed) for seed in (1, 2, 3)]
        taken = [
            jobs._begun(trial, number, jobs.space.sample(trial))
            for number, trial in enumerate(begun)
        ]
        for job in taken[:2]:
            jobs.complete(job, [1.0])
        draw(name="b")  # and the command is killed
    with brute_force_in(tmp_path) as jobs:
        visited = [*map(functools.partial(leaf, jobs), taken[:2]), *rest_of(jobs, at_once)]
    assert (len(visited), len(set(visited))) == (6, 6)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_a_leaf_that_was_being_rebuilt_is_visited(tmp_path: Path, drawn: int) -> None:
    Journal(tmp_path).started(0, ["name=b", "seed=2"])
    with brute_force_in(tmp_path) as jobs:
        jobs.study.sampler = optuna.samplers.PartialFixedSampler(
            {"name": "b", "seed": 2}, optuna.samplers.RandomSampler()
        )
        trial = jobs.study.ask()
        for one in jobs.space.parameters[:drawn]:
            one.suggest(trial)
    with brute_force_in(tmp_path) as jobs:
        assert jobs.rebuild(Journal(tmp_path).states(), None) == [0]
        visited = rest_of(jobs, 2)
    assert (len(visited), len(set(visited))) == (6, 6)


TPE = {"name": "tpe", "n_startup_trials": 2}


def run_jobs(folder: Path, count: int, **changes: object) -> None:
    """Run jobs as a command does, with their own records; of each three one is pruned."""
    record = Journal(folder)
    with jobs_in(folder, **changes) as jobs:
        study_files.StudyFile(study_files.JOURNAL, "sweep", folder.name, mode="min").write(folder)
        for number in range(count):
            (job,) = jobs.take(1)
            overrides = [hydra_setup.closed(one) for one in job.overrides]
            trial = optuna_study.running_trial(jobs.study, jobs.storage, folder.name, number)
            assert trial is not None
            begun, place = record.started(number, overrides), folder / f"{number:04}"
            place.mkdir()
            values = {5: number + 0.5, 10: number % 3 + 0.25}
            if pruned := number % 3 == 2:
                del values[10]
            lines = [{"step": k, "split": "validation", "loss": v} for k, v in values.items()]
            (place / METRICS).write_text("".join(f"{json.dumps(one)}\n" for one in lines))
            for step, value in values.items():
                trial.report(value, step)
            last = min(values.values())
            status = "pruned" if pruned else "finished"
            ended = {"metric": "loss", "step": max(values)}
            record.ended(number, begun, overrides, 0, status=status, objective=last, **ended)
            if pruned:
                trial.set_user_attr("pruned", 5)
                jobs.prune(job)
            else:
                jobs.complete(job, [last])


def told(jobs: Jobs) -> list[object]:
    """Return what a pruner and a sampler know of the first five jobs."""
    return [
        (
            one.state,
            one.values,
            one.params,
            one.intermediate_values,
            one.user_attrs["job"]["overrides"],
        )
        for number, one in sorted(jobs.newest().items())
        if number < 5
    ]


@pytest.mark.parametrize("seed", [0, None])
def test_a_study_that_was_cut_off_anywhere_is_rebuilt(tmp_path: Path, seed: int | None) -> None:
    run_jobs(tmp_path, 5, sampler=TPE, seed=seed)
    known, journal = Journal(tmp_path).states(), tmp_path / study_files.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    whole = told(jobs_in(tmp_path))
    with jobs_in(tmp_path, sampler=TPE) as jobs:
        assert jobs.rebuild(known, "loss") == []
    rebuilt = []
    for count in range(0, len(lines), 3 if seed == 0 else 7):
        journal.write_bytes(b"".join(lines[:count]))
        with jobs_in(tmp_path, sampler=TPE, seed=seed) as jobs:
            rebuilt.append(len(jobs.rebuild(known, "loss")))
            (job,) = jobs.take(1)
            if job.number == 2:  # all was there but the word that it has ended
                jobs.prune(job)
            elif job.number < 5:
                jobs.complete(job, [job.number % 3 + 0.25])
            assert told(jobs) == whole
    assert rebuilt[0] == 5
    assert sorted(rebuilt, reverse=True) == rebuilt


def test_a_job_under_way_whose_trial_was_lost_goes_on_with_its_parameters(tmp_path: Path) -> None:
    with jobs_in(tmp_path, seed=None) as jobs:
        for job in jobs.take(3)[::2]:  # of the second nothing was begun
            overrides = [hydra_setup.closed(one) for one in job.overrides]
            Journal(tmp_path).started(job.number, overrides)
    begun = Journal(tmp_path).states()
    (tmp_path / study_files.JOURNAL).unlink()
    with jobs_in(tmp_path, seed=None) as jobs:
        assert jobs.rebuild(begun, None) == [0, 2]
        taken = {job.number: job.overrides for job in jobs.take(4)}
        assert sorted(taken) == [0, 1, 2, 3]
        for number in begun:
            known = jobs.space.chosen(begun[number].overrides)
            assert jobs.space.chosen(taken[number]) == known


@pytest.mark.parametrize("values", ["optimizer.lr=7.5", "optimizer.lr=big"])
def test_a_lost_trial_with_values_of_another_search_is_refused(tmp_path: Path, values: str) -> None:
    Journal(tmp_path).started(3, ["name=x", values, "seed=2"])
    with jobs_in(tmp_path) as jobs, pytest.raises(ConfigError, match=f"job 0003: {values}"):
        jobs.rebuild(Journal(tmp_path).states(), None)


def test_a_pruned_job_is_recorded_as_such(tmp_path: Path) -> None:
    with jobs_in(tmp_path) as jobs:
        (job,) = jobs.take(1)
        trial = optuna_study.running_trial(jobs.study, jobs.storage, tmp_path.name, job.number)
        assert trial is not None
        trial.report(0.25, 10)
        assert not jobs.pruned(job)
        trial.set_user_attr("pruned", 10)
        assert jobs.pruned(job)
        jobs.prune(job)
        assert jobs.newest()[0].state is TrialState.PRUNED
        assert jobs.newest()[0].value == 0.25
