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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from runner.run_dir import lock
from runner.run_dir import study as study_files
from runner.sweep import attempt
from runner.sweep.search_space import Space
from runner.sweep.study_settings import Settings
from runner.training import optuna_study
from runner.training.optuna_study import JOB
from runner.training.state import PRUNED

LOCK, COMMANDS = ".optuna.lock", ".optuna-command-"
FAILURE, EXHAUSTED = "failure", "exhausted"
# Their draws belong to one sequence, so that all trials have the same seed.
SEQUENCES = ("qmc",)


@dataclass(frozen=True)
class TrialJob:
    """A job that this command is to run; `trial` is the number of its trial."""

    number: int
    overrides: tuple[str, ...]
    trial: int


class Jobs:
    """The jobs of one sweep in a study, as one command sees them; use it in a `with` statement."""

    def __init__(
        self,
        study: optuna.Study,
        storage: BaseStorage,
        settings: Settings,
        space: Space,
        sweep_dir: Path,
    ) -> None:
        self.study, self.settings, self.space = study, settings, space
        self.sweep_dir = sweep_dir
        self.storage = storage
        self._command = secrets.token_hex(4)
        self._stack = contextlib.ExitStack()
        self._failed_before: dict[int, int] = {}

    def __enter__(self) -> Jobs:
        """Begin to run jobs: mark this command as alive."""
        with self._exclusive():
            self._remove_dead_commands()
            self._stack.enter_context(_alive(self._file_of(self._command)))
            self._drop_unborn()
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
        return optuna_study.trials_of(self.study, self.settings_name)

    @property
    def settings_name(self) -> str:
        """How trials of this sweep are marked."""
        return self.sweep_dir.name

    def take(self, most: int) -> list[TrialJob]:
        """Return up to `most` jobs to run now, in the order of their numbers.

        First those that a killed command has left, then those that have failed before this command,
        then new ones. Empty: nothing is left that other commands do not run.
        """
        with self._exclusive():
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
            count = len(newest)
            while len(taken) < most and count < self.settings.n_trials and not self.exhausted:
                taken.append(self._new(count))
                count += 1
        return sorted(taken, key=lambda job: job.number)

    @property
    def exhausted(self) -> bool:
        """Whether the sampler has seen the whole space."""
        return bool(self.study.user_attrs.get(EXHAUSTED))

    def complete(self, job: TrialJob, values: Sequence[float]) -> None:
        """Record the objectives of a job."""
        self._tell(job, list(values), None)

    def prune(self, job: TrialJob) -> None:
        """Record that a job was pruned."""
        self._tell(job, None, TrialState.PRUNED)

    def fail(self, job: TrialJob, reason: str, again: bool) -> None:
        """Record that a job has failed; `again`: the next command tries it again."""
        self._running(job.trial).set_user_attr(FAILURE, {"reason": reason, "again": again})
        self._tell(job, None, TrialState.FAIL)

    def pruned(self, job: TrialJob) -> bool:
        """Return whether the run of a job has been pruned, perhaps under an earlier trial."""
        summary = attempt.summary_of(study_files.job_folder(self.sweep_dir, job.number))
        decided = PRUNED in self._running(job.trial).user_attrs
        return decided if not summary else summary.get("stopped") == PRUNED

    # -- trials ----------------------------------------------------------------------------

    def _running(self, number: int) -> optuna.Trial:
        return optuna_study.trial_numbered(self.study, self.storage, number)

    def _taken_over(self, number: int, trial: FrozenTrial) -> TrialJob:
        job = {**trial.user_attrs[JOB], "command": self._command}
        self._running(trial.number).set_user_attr(JOB, job)
        return TrialJob(number, tuple(job["overrides"]), trial.number)

    def _again(self, number: int, failed: FrozenTrial) -> TrialJob:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            random = optuna.samplers.RandomSampler()
            self.study.sampler = optuna.samplers.PartialFixedSampler(failed.params, random)
        return self._asked(number, failed)

    def _new(self, number: int) -> TrialJob:
        # Sweeps that share a study must not draw the same.
        shared = self.settings.storage is not None
        trial = len(self.study.get_trials(deepcopy=False)) if shared else number
        self.study.sampler = self._sampler(trial)
        return self._asked(number, None)

    def _asked(self, number: int, before: FrozenTrial | None) -> TrialJob:
        """Begin a trial; where the job failed `before`, with what its run has reported so far."""
        trial = self.study.ask()
        overrides = self.space.sample(trial)
        if before is not None:
            overrides = before.user_attrs[JOB]["overrides"]
            for step, value in before.intermediate_values.items():
                trial.report(value, step)
            if PRUNED in before.user_attrs:
                trial.set_user_attr(PRUNED, before.user_attrs[PRUNED])
        job = {
            **{"number": number, "sweep": self.settings_name, "command": self._command},
            "overrides": list(overrides),
        }
        trial.set_user_attr(JOB, job)
        return TrialJob(number, tuple(overrides), trial.number)

    def _sampler(self, trial: int) -> Any:
        spec, seed = self.settings.sampler, self.settings.seed
        if seed is None:
            return optuna_study.make(optuna_study.SAMPLER, spec)
        own = int(np.random.SeedSequence((seed, trial)).generate_state(1)[0])
        if spec["name"] in SEQUENCES:
            rest = optuna.samplers.RandomSampler(seed=own)
            return optuna_study.make(
                optuna_study.SAMPLER, spec, seed=seed, independent_sampler=rest
            )
        return optuna_study.make(optuna_study.SAMPLER, spec, seed=own)

    def _tell(self, job: TrialJob, values: list[float] | None, state: TrialState | None) -> None:
        try:
            self.study.tell(job.trial, values, state)
        except RuntimeError:
            # A sampler that has seen everything stops the study, which Optuna refuses outside of
            # `optimize`, once the trial has been recorded.
            recorded = self.study.get_trials(deepcopy=False)[job.trial].state
            if not recorded.is_finished():
                raise
            self.study.set_user_attr(EXHAUSTED, True)

    def _drop_unborn(self) -> None:
        """Record as failed what a command was asking for when it was killed: it was never run."""
        if self.settings.storage is not None:  # those of other sweeps may be under way
            return
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if JOB not in trial.user_attrs:
                self.study.tell(trial.number, state=TrialState.FAIL)

    # -- commands --------------------------------------------------------------------------

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        return _unless_not_offered(self.sweep_dir / LOCK)

    def _file_of(self, command: str) -> Path:
        return self.sweep_dir / f"{COMMANDS}{command}"

    def _is_alive(self, trial: FrozenTrial) -> bool:
        command = trial.user_attrs[JOB]["command"]
        return command == self._command or lock.is_held(self._file_of(command))

    def _remove_dead_commands(self) -> None:
        for path in self.sweep_dir.glob(f"{COMMANDS}*"):
            if not lock.is_held(path):
                path.unlink(missing_ok=True)


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
