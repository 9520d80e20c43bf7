"""Jobs of a study: which are finished, which are to be run, and what became of them.

A job is a number, its overrides and the run directory ``<sweep>/<number>``; the newest trial with
its number is its record. Several commands may run jobs of one study: each holds a lock on a file of
its own as long as it lives, and whoever finds a running trial of a command that is gone takes it
over, with the same parameters and the same directory. A failed job is tried again by the next
command, as a new trial with the same parameters; one whose objective is no number is not.

The k-th job of a study is drawn with a seed made of the study's seed and k. So a study that was
killed and continued chooses what it would have chosen without that, as long as the trials before
are the same, and ended in the same order (jobs one at a time, and deterministic=true).
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from runner.runs import lock, sessions
from runner.runs import study as study_files
from runner.sweep.search_space import Space
from runner.sweep.study_settings import Settings
from runner.training import optuna_study
from runner.training.optuna_study import JOB
from runner.training.state import PRUNED

LOCK, COMMANDS = ".optuna.lock", ".optuna-command-"
FAILURE = "failure"
# Their draws belong to one sequence, so that all trials have the same seed.
SEQUENCES = ("qmc",)


@dataclass(frozen=True)
class TrialJob:
    """A job that this command is to run; `trial` is the number of its trial."""

    number: int
    overrides: tuple[str, ...]
    trial: int


class Jobs:
    """The jobs of a study, as one command sees them; use it in a `with` statement."""

    def __init__(
        self,
        study: optuna.Study,
        storage: BaseStorage,
        settings: Settings,
        space: Space,
        sweep_dir: Path,
    ) -> None:
        self.study, self.settings, self.space = study, settings, space
        self.sweep_dir, self.storage = sweep_dir, storage
        self._command = secrets.token_hex(4)
        self._stack = contextlib.ExitStack()
        self._failed_before: dict[int, int] = {}

    def __enter__(self) -> Jobs:
        """Begin to run jobs: mark this command as alive."""
        with one_at_a_time(self.sweep_dir):
            for path in self.sweep_dir.glob(f"{COMMANDS}*"):
                if not lock.is_held(path):
                    path.unlink(missing_ok=True)
            self._stack.enter_context(_alive(self._file_of(self._command)))
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if JOB not in trial.user_attrs:  # a command was killed as it asked for it
                    self.study.tell(trial.number, state=TrialState.FAIL)
            self._failed_before = {
                number: trial.number
                for number, trial in self.newest().items()
                if trial.state is TrialState.FAIL and trial.user_attrs[FAILURE]["again"]
            }
        return self

    def __exit__(self, *_: object) -> None:
        """End: what is still running may be taken over by other commands."""
        self._stack.close()

    def newest(self) -> dict[int, FrozenTrial]:
        """Return the newest trial of each job."""
        return optuna_study.trials_of(self.study)

    def take(self, most: int) -> list[TrialJob]:
        """Return up to `most` jobs to run now, in the order of their numbers.

        First those that a killed command has left, then those that have failed before this command,
        then new ones. Empty: nothing is left that other commands do not run.
        """
        with one_at_a_time(self.sweep_dir):
            newest = self.newest()
            taken = [
                self._taken_over(number, trial)
                for number, trial in newest.items()
                if trial.state is TrialState.RUNNING and not self._is_alive(trial)
            ][:most]
            for number, before in list(self._failed_before.items())[: most - len(taken)]:
                del self._failed_before[number]
                if newest[number].number == before:  # no other command has tried it again
                    taken.append(self._again(number, newest[number]))
            new = [number for number in range(self.settings.n_trials) if number not in newest]
            taken += [self._new(number) for number in new[: most - len(taken)]]
        return sorted(taken, key=lambda job: job.number)

    def complete(self, job: TrialJob, values: Sequence[float]) -> None:
        """Record the objectives of a job."""
        self.study.tell(job.trial, list(values))

    def prune(self, job: TrialJob) -> None:
        """Record that a job was pruned."""
        self.study.tell(job.trial, state=TrialState.PRUNED)

    def fail(self, job: TrialJob, reason: str, again: bool) -> None:
        """Record that a job has failed; `again`: the next command tries it again."""
        self._running(job.trial).set_user_attr(FAILURE, {"reason": reason, "again": again})
        self.study.tell(job.trial, state=TrialState.FAIL)

    def pruned(self, job: TrialJob) -> bool:
        """Return whether the run of a job has been pruned, perhaps under an earlier trial."""
        summary = sessions.summary(study_files.job_folder(self.sweep_dir, job.number))
        decided = PRUNED in self._running(job.trial).user_attrs
        return decided if not summary else summary.get("stopped") == PRUNED

    # -- trials ----------------------------------------------------------------------------

    def _running(self, number: int) -> optuna.Trial:
        return optuna_study.trial_numbered(self.study, self.storage, number)

    def _taken_over(self, number: int, trial: FrozenTrial) -> TrialJob:
        job = {**trial.user_attrs[JOB], "command": self._command}
        self._running(trial.number).set_user_attr(JOB, job)
        return TrialJob(number, tuple(job["overrides"]), trial.number)

    def _new(self, number: int) -> TrialJob:
        self.study.sampler = self._sampler(number)
        trial = self.study.ask()
        return self._begun(trial, number, self.space.sample(trial))

    def _again(self, number: int, failed: FrozenTrial) -> TrialJob:
        """Begin another trial of a failed job, with what its run has reported so far."""
        self.study.sampler = _fixed(failed.params)
        trial = self.study.ask()
        self.space.sample(trial)
        for step, value in failed.intermediate_values.items():
            trial.report(value, step)
        if PRUNED in failed.user_attrs:
            trial.set_user_attr(PRUNED, failed.user_attrs[PRUNED])
        return self._begun(trial, number, failed.user_attrs[JOB]["overrides"])

    def _begun(self, trial: optuna.Trial, number: int, overrides: Sequence[str]) -> TrialJob:
        """Mark a trial as that of a job which this command runs."""
        job = {"number": number, "command": self._command, "overrides": list(overrides)}
        trial.set_user_attr(JOB, job)
        return TrialJob(number, tuple(overrides), trial.number)

    def _sampler(self, number: int) -> Any:
        spec, seed = self.settings.sampler, self.settings.seed
        if seed is None:
            return optuna_study.make(optuna_study.SAMPLER, spec)
        own = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        if spec["name"] in SEQUENCES:
            rest = optuna.samplers.RandomSampler(seed=own)
            return optuna_study.make(
                optuna_study.SAMPLER, spec, seed=seed, independent_sampler=rest
            )
        return optuna_study.make(optuna_study.SAMPLER, spec, seed=own)

    # -- commands --------------------------------------------------------------------------

    def _file_of(self, command: str) -> Path:
        return self.sweep_dir / f"{COMMANDS}{command}"

    def _is_alive(self, trial: FrozenTrial) -> bool:
        command = trial.user_attrs[JOB]["command"]
        return command == self._command or lock.is_held(self._file_of(command))


def _fixed(parameters: Mapping[str, Any]) -> optuna.samplers.BaseSampler:
    """Return a sampler that draws known parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        random = optuna.samplers.RandomSampler()
        return optuna.samplers.PartialFixedSampler(dict(parameters), random)


def one_at_a_time(sweep_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Let no other command of a sweep begin or take jobs in the context."""
    return _unless_not_offered(sweep_dir / LOCK)


@contextlib.contextmanager
def _alive(path: Path) -> Iterator[None]:
    """Mark a command as alive in the context by the lock of a file, which is removed after it."""
    try:
        with _unless_not_offered(path):
            yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _unless_not_offered(path: Path) -> Iterator[None]:
    """Hold the lock of a file in the context, where the file system offers locks."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.waited_for(path))
        except OSError as error:
            if error.errno not in lock.NOT_OFFERED:
                raise
            path.touch()
        yield
