"""Jobs of a study: which are finished, which are to be run, and what became of them.

A job is a number, its overrides and the run directory ``<sweep>/<number>``; the newest trial with
its number is its record. Several commands may run jobs of one study: each holds a lock on a file of
its own as long as it lives, and whoever finds a running trial of a command that is gone takes it
over, with the same parameters and the same directory. A failed job is tried again by the next
command, as a new trial with the same parameters; one whose objective is no number is not. Where the
study has lost trials (its journal was removed, or cut off), they are rebuilt from the sweep's own
journal and from what their runs have measured: a pruner compares with that.

The k-th job of a study is drawn with a seed made of the study's seed and k. So a study that was
killed and continued chooses what it would have chosen without that, as long as the trials before
are the same, and ended in the same order (jobs one at a time, and deterministic=true).
"""

from __future__ import annotations

import contextlib
import math
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

from accel.machine.errors import ConfigError
from runner.run_dir import lock, measurements
from runner.run_dir import study as study_files
from runner.run_dir.sweep_records import PRUNED as PRUNED_JOB
from runner.sweep import attempt
from runner.sweep.journal import JobState
from runner.sweep.search_space import Space
from runner.sweep.study_settings import Settings
from runner.training import optuna_study
from runner.training.optuna_study import JOB
from runner.training.state import PRUNED

LOCK, COMMANDS = ".optuna.lock", ".optuna-command-"
FAILURE, EXHAUSTED = "failure", "exhausted"
# Their draws belong to one sequence, so that all trials have the same seed.
SEQUENCES = ("qmc",)
# It counts what has been drawn, whatever became of it, and says when nothing is left.
EXHAUSTIVE = ("bruteforce",)
NOBODY = ""  # a command that no trial waits for


@dataclass(frozen=True)
class TrialJob:
    """A job that this command is to run; `trial` is the number of its trial."""

    number: int
    overrides: tuple[str, ...]
    trial: int


class Jobs:
    """The jobs of one sweep in a study, as one command sees them; use it in a `with` statement.

    `mark` tells the sweep's trials from those of others in a shared study.
    """

    def __init__(
        self,
        study: optuna.Study,
        storage: BaseStorage,
        settings: Settings,
        space: Space,
        sweep_dir: Path,
        mark: str,
    ) -> None:
        self.study, self.settings, self.space = study, settings, space
        self.sweep_dir, self.mark = sweep_dir, mark
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
        return optuna_study.trials_of(self.study, self.mark)

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
            for number in range(self.settings.n_trials):
                if len(taken) >= most or self.exhausted:
                    break
                if number not in newest and (job := self._new(number)) is not None:
                    taken.append(job)
        return sorted(taken, key=lambda job: job.number)

    @property
    def exhausted(self) -> bool:
        """Whether the sampler has seen the whole space."""
        return bool(self.study.user_attrs.get(EXHAUSTED))

    def rebuild(self, known: Mapping[int, JobState], monitor: str | None) -> list[int]:
        """Rebuild trials that the study has lost; return the numbers of their jobs.

        One that has ended is told to the study at once, another is taken over by the next batch.

        Args:
            known: the jobs of the sweep's own journal.
            monitor: the metric that runs monitor; None: as their records name it.

        Raises:
            ConfigError: if the search has no such values.
        """
        rebuilt = []
        with self._exclusive():
            newest = self.newest()
            for number, state in sorted(known.items()):
                there = newest.get(number)
                if there is not None and not (state.is_complete and self._is_open(there)):
                    continue
                measured = self._measured(number, state, monitor)
                # A command that was killed as a job ended has not told the study of that alone.
                if there is None or measured.keys() - there.intermediate_values:
                    self._rebuild(number, state, there, measured)
                    rebuilt.append(number)
        return rebuilt

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
        self.study.sampler = _fixed(failed.params)
        return self._asked(number, failed)

    def _new(self, number: int) -> TrialJob | None:
        """Begin the trial of a new job; None: an exhaustive sampler has nothing left to draw."""
        self._choose_sampler(number)
        if not self._is_exhaustive:
            return self._asked(number, None)
        while not self.exhausted:
            trial = self._unborn_with() or self.study.ask()
            overrides = self.space.sample(trial)
            if not self._is_repeated(trial.number):
                return self._begun(trial, number, overrides)
            # All others have been drawn, and some of them are still running.
            self._note_end(trial.number, None, TrialState.FAIL)
        return None

    @property
    def _is_exhaustive(self) -> bool:
        return self.settings.sampler["name"] in EXHAUSTIVE

    def _is_repeated(self, number: int) -> bool:
        """Return whether another trial has the parameters of this one.

        Of two sweeps that share a study and draw the same at once, at least one keeps it.
        """
        trials = self.study.get_trials(deepcopy=False)
        others = (one for one in trials if one.number < number or JOB in one.user_attrs)
        drawn = trials[number].params
        return any(one.params == drawn for one in others if one.number != number)

    def _choose_sampler(self, number: int) -> None:
        # Sweeps that share a study must not draw the same.
        shared = self.settings.storage is not None
        trial = len(self.study.get_trials(deepcopy=False)) if shared else number
        self.study.sampler = self._sampler(trial)

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
        return self._begun(trial, number, overrides)

    def _begun(self, trial: optuna.Trial, number: int, overrides: Sequence[str]) -> TrialJob:
        """Mark a trial as that of a job which this command runs."""
        job = {
            **{"number": number, "sweep": self.mark, "command": self._command},
            "overrides": list(overrides),
        }
        trial.set_user_attr(JOB, job)
        return TrialJob(number, tuple(overrides), trial.number)

    # -- trials that the study has lost ----------------------------------------------------

    def _is_open(self, trial: FrozenTrial) -> bool:
        """Return whether a trial is to be run by whoever takes it."""
        if trial.state is TrialState.RUNNING:
            return not self._is_alive(trial)
        return trial.state is TrialState.FAIL and bool(trial.user_attrs[FAILURE]["again"])

    def _measured(self, number: int, state: JobState, monitor: str | None) -> dict[int, float]:
        """Return what the run of a job has to report, by steps."""
        file = study_files.of_sweep(self.sweep_dir)
        if file is None or file.mode is None:
            return {}
        metric = file.metric or str(state.ended.get("metric") or monitor)
        folder = study_files.job_folder(self.sweep_dir, number)
        return measurements.history(folder, "validation", metric)

    def _rebuild(
        self, number: int, state: JobState, there: FrozenTrial | None, measured: Mapping[int, float]
    ) -> None:
        if there is None:
            job = self._drawn_again(number, state.overrides)
        elif there.state is TrialState.RUNNING:
            job = self._taken_over(number, there)
        else:
            self._failed_before.pop(number, None)
            job = self._again(number, there)
        trial = self._running(job.trial)
        reported = self.study.get_trials(deepcopy=False)[job.trial].intermediate_values
        for step in sorted(measured.keys() - reported.keys()):
            trial.report(measured[step], step)
        values = self._values_of(state)
        if state.status == PRUNED_JOB:
            trial.set_user_attr(PRUNED, state.ended.get("step"))
            self.prune(job)
        elif values is not None:
            self.complete(job, values)
        else:
            trial.set_user_attr(JOB, {**trial.user_attrs[JOB], "command": NOBODY})

    def _values_of(self, state: JobState) -> list[float] | None:
        """Return the objectives of a finished job; None: the next batch finds out about it."""
        if not state.is_complete or state.objective is None:
            return None
        value = state.objective
        values = value if isinstance(value, list) else [value]
        is_whole = len(values) == len(self.settings.metrics) and all(map(math.isfinite, values))
        return values if is_whole else None

    def _drawn_again(self, number: int, overrides: Sequence[str]) -> TrialJob:
        """Begin the trial of a job that the study does not know, with the job's parameters.

        The sampler draws first, since some count what they have drawn. It mostly draws the same
        again; if not (no seed, several jobs at once), the draw is given up. An exhaustive sampler
        would take a draw that was given up for one that has been tried, and so draws nothing here.
        """
        wanted = self.space.chosen(overrides)
        job = None
        if not self._is_exhaustive:
            self._choose_sampler(number)
            job = self._asked_if(number, wanted)
        if job is None:
            values = self._values_in(number, wanted)
            self.study.sampler = _fixed(values)
            job = self._asked_if(number, wanted, self._unborn_with(values))
        if job is None:
            raise _other_values(number, wanted)
        return job

    def _unborn(self) -> list[FrozenTrial]:
        """Return the trials that killed commands had begun to draw: none is drawn meanwhile.

        In a study that sweeps share, these may be under way in another one, and none counts.
        """
        if self.settings.storage is not None:
            return []
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [trial for trial in running if JOB not in trial.user_attrs]

    def _unborn_with(self, values: Mapping[str, Any] | None = None) -> optuna.Trial | None:
        """Take a trial that a killed command had begun to draw; one of these values, if any."""
        for found in self._unborn():
            if values is None or found.params.items() <= values.items():
                return self._running(found.number)
        return None

    def _asked_if(
        self, number: int, wanted: Mapping[str, str], trial: optuna.Trial | None = None
    ) -> TrialJob | None:
        """Begin a trial, or go on with one, if the sampler draws what is wanted."""
        trial = trial or self.study.ask()
        overrides = self.space.sample(trial)
        if self.space.chosen(overrides) == wanted:
            return self._begun(trial, number, overrides)
        self._give_up(trial.number)
        return None

    def _values_in(self, number: int, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Return values for the sampler; a ConfigError if the space lacks one of them."""
        try:
            return {
                one.key: one.value_of(wanted[one.key])
                for one in self.space.parameters
                if one.key in wanted
            }
        except ValueError as error:
            raise _other_values(number, wanted) from error

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
        if self._is_exhaustive:  # it, not the one that has drawn last, tells whether all is seen
            self._choose_sampler(job.number)
        self._note_end(job.trial, values, state)

    def _note_end(self, trial: int, values: list[float] | None, state: TrialState | None) -> None:
        # What lies below a draw that was cut off is not seen before a job goes on with it.
        if self._end(trial, values, state) and not self._unborn():
            self.study.set_user_attr(EXHAUSTED, True)

    def _give_up(self, trial: int) -> None:
        """Record as failed a trial that is no job; what its sampler says of it ends nothing."""
        self._end(trial, None, TrialState.FAIL)

    def _end(self, trial: int, values: list[float] | None, state: TrialState | None) -> bool:
        """Record how a trial has ended; return whether its sampler has now seen everything."""
        try:
            self.study.tell(trial, values, state)
        except RuntimeError:
            # A sampler that has seen everything stops the study, which Optuna refuses outside of
            # `optimize`, once the trial has been recorded.
            if not self.study.get_trials(deepcopy=False)[trial].state.is_finished():
                raise
            return True
        return False

    def _drop_unborn(self) -> None:
        """Drop what a command was asking for when it was killed: it was never run.

        For an exhaustive sampler the next new job goes on with it: else nobody would try it.
        """
        if self._is_exhaustive:
            return
        for trial in self._unborn():
            self._give_up(trial.number)

    # -- commands --------------------------------------------------------------------------

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        return one_at_a_time(self.sweep_dir)

    def _file_of(self, command: str) -> Path:
        return self.sweep_dir / f"{COMMANDS}{command}"

    def _is_alive(self, trial: FrozenTrial) -> bool:
        command = trial.user_attrs[JOB]["command"]
        return command == self._command or lock.is_held(self._file_of(command))

    def _remove_dead_commands(self) -> None:
        for path in self.sweep_dir.glob(f"{COMMANDS}*"):
            if not lock.is_held(path):
                path.unlink(missing_ok=True)


def _fixed(parameters: Mapping[str, Any]) -> optuna.samplers.BaseSampler:
    """Return a sampler that draws known parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        random = optuna.samplers.RandomSampler()
        return optuna.samplers.PartialFixedSampler(dict(parameters), random)


def _other_values(number: int, values: Mapping[str, str]) -> ConfigError:
    shown = " ".join(f"{key}={value}" for key, value in values.items())
    rule = "this search draws no such values, and its study has lost the trial of this job"
    remedy = "Search the values that the sweep began with, or start another sweep."
    return ConfigError.of(f"job {number:04}: {shown}", rule, remedy)


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
