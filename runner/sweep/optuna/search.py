"""A search with Optuna over any of Hydra's launchers, and its result. Free of torch.

Optuna's storage is the record. Each trial carries the number of its job, the job's state is that of
its run. A running trial whose run nobody trains was interrupted, and goes on as the same trial. A
failed job is tried again, once by each command, as a new trial with the same parameters.

The k-th job is drawn with a seed made of the study's seed and k: a search that was interrupted
chooses what it would have chosen otherwise, as long as its trials end in the same order.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from hydra.plugins.launcher import Launcher
from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState

from accel.machine.errors import ConfigError
from runner.recipe import hydra_setup, processes
from runner.recipe.plugins import SWEEPER, SearchConf
from runner.runs import lock, numerics
from runner.runs.record import RunRecord
from runner.sweep.job import JobFailed, JobStopped, Task
from runner.sweep.optuna.space import Space
from runner.sweep.plan import AUTO, alone
from runner.sweep.sweep import WAIT_SECONDS, Sweep
from runner.sweep.table import values_of
from runner.training import optuna_study
from runner.training.optuna_study import JOB, PRUNER, SAMPLER
from runner.training.state import PRUNED

SWEEP = "sweep"  # a study's user attribute: which sweep it is of


def search(
    arguments: Sequence[str], settings: Mapping[str, Any], task: Task, launcher: Launcher
) -> None:
    """Search, from where an earlier command has left off.

    Args:
        arguments: overrides of the command.
        settings: `hydra.sweeper`.
        task: of the sweep.
        launcher: Hydra's, ready to launch.

    Raises:
        ConfigError: if the study is another sweep's, or its database fails.
        JobFailed: if too many jobs fail.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = SearchConf(**settings)
    found.n_jobs = found.n_jobs or _at_once(task)
    with hydra_setup.session():
        space = Space.read(arguments, found.params, found.when)
    try:
        Search(found, space, task.sweep, launcher).run()
    except optuna_study.FAILURES as error:  # the database went away
        place = task.sweep.description.search["storage"]
        raise optuna_study.failed_database(place, error) from error


def _at_once(task: Task) -> int:
    """Return how many jobs run at once on this machine; 1 under other launchers."""
    if task.local is None:
        return 1
    if task.local.jobs == AUTO:
        return processes.num_accelerators() or numerics.cores()
    return int(task.local.jobs)


@dataclass(frozen=True)
class Job:
    """A job that this command is to run."""

    number: int
    overrides: tuple[str, ...]
    trial: Trial


class Search:
    """One command's work on a study: batches of jobs until the study has as many as it wants.

    Args:
        settings: `hydra.sweeper`.
        space: what is searched.
        sweep: its folder and description, which says where the study is.
        launcher: Hydra's, ready to launch.
    """

    def __init__(
        self, settings: SearchConf, space: Space, sweep: Sweep, launcher: Launcher
    ) -> None:
        self.settings, self.space, self.sweep, self.launcher = settings, space, sweep, launcher
        with lock.held(sweep.path, WAIT_SECONDS):  # the first command makes the study
            self.study, self._storage = self._open()
        self._stopped = False
        self._begin = time.monotonic()
        self._failed_before: dict[int, int] = {}
        self._unmeasured = ""  # which objective a job lacks

    def run(self) -> None:
        """Run jobs until the study is complete, and print what was found."""
        before = self.newest()
        ended = sum(trial.state.is_finished() for trial in before.values())
        if before:
            print(f"The study goes on: {ended} of {self.settings.n_trials} trials have ended.")
        self._failed_before = {
            number: trial.number
            for number, trial in before.items()
            if trial.state is TrialState.FAIL and not RunRecord(self.sweep.run_dir(number)).is_done
        }
        while not self._stopped and not self._time_is_up():
            batch = self._take(self.settings.n_jobs or 1)
            if not batch:
                break
            for group in _consecutive(batch):
                self._launch(group)
            states = {trial.state for trial in self.newest().values()}
            if self._unmeasured and not states & {TrialState.COMPLETE, TrialState.PRUNED}:
                raise JobFailed(self._unmeasured)  # its name is misspelt
        if not self._stopped:
            self.show()

    def newest(self) -> dict[int, FrozenTrial]:
        """Return the newest trial of each job, by the job's number."""
        return optuna_study.trials_of(self.study)

    def _open(self) -> tuple[optuna.Study, optuna.storages.BaseStorage]:
        """Create the study, or open that of an earlier command.

        Raises:
            ConfigError: if the study is another sweep's, or was lost.
        """
        there = self.sweep.description
        place, name = there.search["storage"], there.search["study_name"]
        rule = "the study of the sweep's jobs is not there"
        remedy = "Restore it from a copy, or begin a new search with sweep.dir=DIR."
        lost, is_begun = ConfigError.of(place, rule, remedy), bool(self.sweep.started())
        if is_begun and not optuna_study.is_there(place, self.sweep.path):
            raise lost
        storage = optuna_study.storage_of(place, self.sweep.path)
        if is_begun and name not in optuna.get_all_study_names(storage):
            raise lost
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            directions=[f"{mode}imize" for mode in there.search["modes"]],
            pruner=optuna_study.make(PRUNER, self.settings.pruner),
            load_if_exists=True,
        )
        own = [there.digest, there.time]
        if not study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr(SWEEP, own)
        if study.user_attrs.get(SWEEP) != own:
            value = f"{SWEEPER}.study_name={name}"
            rule = "a study is of one sweep, and there is one of that name"
            remedy = "Give another name, or go on with its sweep (sweep.dir=DIR)."
            raise ConfigError.of(value, rule, remedy)
        return study, storage

    # -- trials ----------------------------------------------------------------------------

    def _take(self, most: int) -> list[Job]:
        """Return up to `most` jobs to run now, in the order of their numbers.

        First those that were interrupted, then those that had failed before this command, then new
        ones. Empty: nothing is left that other commands do not run.
        """
        with lock.held(self.sweep.path, WAIT_SECONDS):
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if JOB not in trial.user_attrs:  # a command was killed as it asked for it
                    self.study.tell(trial.number, state=TrialState.FAIL)
            newest = self.newest()
            taken = [
                number
                for number, trial in newest.items()
                if trial.state is TrialState.RUNNING
                and lock.holder(self.sweep.run_dir(number)) is None
            ][:most]
            for number, before in list(self._failed_before.items())[: most - len(taken)]:
                del self._failed_before[number]
                if newest[number].number == before:  # no other command has tried it again
                    self._try_again(newest[number])
                    taken.append(number)
            new = range(len(newest), self.settings.n_trials)[: most - len(taken)]
            newest = self.newest()
            return [self._job(number, newest.get(number)) for number in (*sorted(taken), *new)]

    def _job(self, number: int, found: FrozenTrial | None) -> Job:
        """Return a job, whose trial runs already if it was `found`."""
        self.study.sampler = self._sampler(number)
        if found is not None:
            trial = optuna_study.running(self.study, self._storage, found)
        else:
            trial = self.study.ask()
            trial.set_user_attr(JOB, number)
        return Job(number, tuple(self.space.sample(trial)), trial)

    def _try_again(self, failed: FrozenTrial) -> None:
        """Add a trial with the parameters of a failed one, and with what its run has reported."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            again = optuna.trial.create_trial(
                state=TrialState.RUNNING,
                params=failed.params,
                distributions=failed.distributions,
                user_attrs=failed.user_attrs,
                intermediate_values=failed.intermediate_values,
            )
        self.study.add_trial(again)

    def _sampler(self, number: int) -> Any:
        given, seed = self.settings.sampler, self.settings.seed
        if seed is None:
            return optuna_study.make(SAMPLER, given)
        own = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        sampler = optuna_study.make(SAMPLER, given, seed=own)
        if isinstance(sampler, optuna.samplers.QMCSampler):  # all trials are of one sequence
            rest = optuna.samplers.RandomSampler(seed=own)
            return optuna_study.make(SAMPLER, given, seed=seed, independent_sampler=rest)
        return sampler

    # -- jobs ------------------------------------------------------------------------------

    def _launch(self, group: Sequence[Job]) -> None:
        """Run jobs with consecutive numbers, and tell the study how they have ended."""
        overrides = [list(job.overrides) for job in group]
        ended = self.launcher.launch(overrides, initial_job_idx=group[0].number)
        for job, result in zip(group, ended, strict=True):
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # Hydra prints it once more
                    _ = result.return_value
            except JobStopped:
                self._stopped = True  # its trial stays: the next command goes on with it
            except Exception as error:
                self._tell(job, TrialState.FAIL, f"failed ({error or type(error).__name__})")
            else:
                self._record(job)

    def _record(self, job: Job) -> None:
        """Tell the study the objectives of a run that is done."""
        run, metrics = RunRecord(self.sweep.run_dir(job.number)), self.settings.metrics
        if run.summary.get("stopped") == PRUNED:
            self._tell(job, TrialState.PRUNED, "pruned")
            return
        try:
            values = values_of(run, metrics)
        except ConfigError as error:
            self._unmeasured = str(error)
            self._tell(job, TrialState.FAIL, f"failed ({error})")
            return
        named = _named(metrics, values)
        if all(map(math.isfinite, values)):
            self._tell(job, None, named, values)
        else:
            text = f"failed (an objective is no finite number: {named})"
            self._tell(job, TrialState.FAIL, text)

    def _tell(
        self, job: Job, state: TrialState | None, text: str, values: list[float] | None = None
    ) -> None:
        # Another command may have run the job, too: the run's lock let one train.
        self.study.tell(job.trial.number, values, state=state, skip_if_finished=True)
        print(f"trial {job.number}: {text}", flush=True)

    def _time_is_up(self) -> bool:
        limit = self.settings.timeout
        return limit is not None and time.monotonic() - self._begin >= limit

    # -- what was found --------------------------------------------------------------------

    def show(self) -> None:
        """Print how the trials have ended and, of several objectives, the Pareto front.

        The table of the sweep names the best job for one objective.
        """
        states = Counter(trial.state.name.lower() for trial in self.newest().values())
        counts = ", ".join(f"{number} {state}" for state, number in states.items())
        print(f"{states.total()} trials: {counts or 'none'}")
        metrics = self.settings.metrics
        for trial in self.study.best_trials if len(metrics) > 1 else ():
            print(f"Pareto-optimal trial {trial.user_attrs[JOB]}: {_named(metrics, trial.values)}")
            overrides = self.space.sample(FixedTrial(trial.params))
            print(f"  {alone(overrides, self.sweep.description.config_name)}", flush=True)


def _consecutive(batch: Sequence[Job]) -> Iterator[list[Job]]:
    """Yield runs of jobs whose numbers follow each other, as launchers count."""
    for _, group in itertools.groupby(enumerate(batch), lambda pair: pair[1].number - pair[0]):
        yield [job for _, job in group]


def _named(metrics: Sequence[str], values: Sequence[float]) -> str:
    pairs = zip(metrics, values, strict=True)
    return ", ".join(f"{metric} {value:.6g}" for metric, value in pairs)
