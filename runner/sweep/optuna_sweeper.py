"""A search with Optuna over any of Hydra's launchers, and what it has found. Free of torch.

Jobs go to the launcher in batches of `n_jobs`; the number of a job is the one that Hydra gives it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from accel.machine.errors import ConfigError
from runner.recipe import composition, hydra_setup, processes, sweepers
from runner.runs import numerics, sessions
from runner.runs import study as study_files
from runner.runs.study import BEST, StudyFile
from runner.sweep import study_settings
from runner.sweep.search_space import Space
from runner.sweep.settings import AUTO
from runner.sweep.study_settings import Settings
from runner.sweep.task import JobFailed, JobStopped, Task
from runner.sweep.trial_jobs import Jobs, TrialJob, one_at_a_time
from runner.training import optuna_study
from runner.training.console import PipedConsole
from runner.training.optuna_study import JOB, PRUNER

STUDY = "sweep"
DIRECTIONS = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}


def search(
    arguments: Sequence[str],
    settings: Mapping[str, object],
    sweep_dir: Path,
    config_name: str,
    task: Task,
    launcher: Launcher,
) -> None:
    """Search, from where an earlier command has left off.

    Args:
        arguments: overrides of the command.
        settings: `hydra.sweeper`.
        sweep_dir: folder of the sweep.
        config_name: of the recipes.
        task: of the sweep.
        launcher: Hydra's, ready to launch.

    Raises:
        ConfigError: if the study is another sweep's, or its database fails.
        JobFailed: if too many jobs fail.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    node = {name: _plain(value) for name, value in settings.items()}
    with hydra_setup.session():
        space = Space.read(arguments, node["params"], node["when"])
    found = Settings.read(node)
    if found.n_jobs is None:
        found = replace(found, n_jobs=_at_once(task))
    folder = sweep_dir.expanduser().absolute()
    try:
        Search(found, space, folder, config_name, launcher).run()
    except optuna_study.FAILURES as error:  # the database went away
        raise optuna_study.failed_database(str(found.storage), error) from error


def _at_once(task: Task) -> int:
    """Return how many jobs run at once on this machine; 1 under other launchers."""
    if task.local is None:
        return 1
    if task.local.jobs == AUTO:
        return processes.num_accelerators() or numerics.cores()
    return int(task.local.jobs)


def _plain(value: object) -> object:
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


class Search:
    """One command's work on a study: batches of jobs until the study has as many as it wants.

    Args:
        settings: `hydra.sweeper`.
        space: what is searched.
        sweep_dir: folder of the sweep; it holds the journal of the study and the run directories.
        config_name: of the recipes.
        launcher: Hydra's, ready to launch.
    """

    def __init__(
        self,
        settings: Settings,
        space: Space,
        sweep_dir: Path,
        config_name: str,
        launcher: Launcher,
    ) -> None:
        self.settings, self.space, self.sweep_dir = settings, space, sweep_dir
        self.config_name, self.launcher = config_name, launcher
        self._stopped = False
        self._begin = time.monotonic()
        self._unmeasured: dict[int, ConfigError] = {}  # by jobs that lack an objective
        self._ended_before = 0

    def run(self) -> None:
        """Run jobs until the study is complete, and print what was found."""
        self.sweep_dir.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self.sweep_dir):  # the first command makes the study
            study, storage = self._open()
        with Jobs(study, storage, self.settings, self.space, self.sweep_dir) as found:
            self._note_continued(found)
            self._note_random_keys()
            while not self._stopped and not self._time_is_up():
                batch = found.take(self.settings.n_jobs or 1)
                if not batch:
                    break
                for group in _consecutive(batch):
                    self._launch(found, group)
                self._check_failures(found)
                self._check_measured(found)
        if not self._stopped:
            show(study, found.newest(), self.settings.metrics, self.config_name)

    # -- the study -------------------------------------------------------------------------

    def _open(self) -> tuple[optuna.Study, optuna.storages.BaseStorage]:
        """Create the study, or open that of an earlier command.

        Raises:
            ConfigError: if the study is another sweep's.
        """
        settings = self.settings
        modes, reported = self._modes(), settings.reported
        place = settings.storage or study_files.JOURNAL
        if settings.storage and "://" not in settings.storage:
            place = str(Path.cwd() / settings.storage)
        own_name = self.sweep_dir.name if settings.storage else STUDY
        file = StudyFile(
            storage=place,
            name=settings.study_name or own_name,
            metric=None if reported == BEST else reported,
            mode=None if reported is None else modes[0],
            pruner=settings.pruner or {},
            metrics=settings.metrics,
            modes=modes,
        )
        storage = optuna_study.storage_of(file.storage, self.sweep_dir)
        earlier = study_files.of_sweep(self.sweep_dir)
        names = optuna.get_all_study_names(storage)
        if earlier is None:
            if file.name in names:
                value = f"{sweepers.NODE}.study_name={file.name}"
                rule = "a study is of one sweep, and there is one of that name"
                remedy = "Give another name, or go on with its sweep (sweep.dir=DIR)."
                raise ConfigError.of(value, rule, remedy)
            file.write(self.sweep_dir)  # before the study: from now on it is this sweep's
        else:
            file = replace(file, name=earlier.name)  # the folder may have been renamed
            if file.name not in names and any(self.sweep_dir.glob("[0-9]*")):
                rule = "the study of the sweep's jobs is not there"
                remedy = "Restore it from a copy, or begin a new search with sweep.dir=DIR."
                raise ConfigError.of(place, rule, remedy)
        study = optuna.create_study(
            study_name=file.name,
            storage=storage,
            directions=[DIRECTIONS[mode] for mode in modes],
            pruner=optuna_study.make(PRUNER, settings.pruner),
            load_if_exists=True,
        )
        return study, storage

    def _modes(self) -> tuple[str, ...]:
        """Return "min" or "max" of each objective."""
        if BEST not in self.settings.metrics:
            assert self.settings.modes is not None
            return self.settings.modes
        with hydra_setup.session():
            probe = composition.new_run(self.space.probes()[0], self.config_name)
        return study_settings.modes_of(self.settings, composition.require(probe))

    # -- jobs ------------------------------------------------------------------------------

    def _launch(self, found: Jobs, group: Sequence[TrialJob]) -> None:
        """Run jobs with consecutive numbers, and record how they have ended."""
        overrides = [list(job.overrides) for job in group]
        ended = self.launcher.launch(overrides, initial_job_idx=group[0].number)
        for job, result in zip(group, ended, strict=True):
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # Hydra prints it once more
                    value = result.return_value
            except JobStopped:
                self._stopped = True  # its trial stays: the next command goes on with it
            except Exception as error:
                found.fail(job, str(error) or type(error).__name__, again=True)
                print(f"trial {job.number}: failed ({error})", flush=True)
            else:
                self._record(found, job, value)

    def _record(self, found: Jobs, job: TrialJob, returned: object) -> None:
        if found.pruned(job):
            found.prune(job)
            print(f"trial {job.number}: pruned", flush=True)
            return
        try:
            values = self._values(job, returned)
        except ConfigError as error:
            self._unmeasured[job.number] = error
            found.fail(job, str(error), again=True)
            print(f"trial {job.number}: failed ({error})", flush=True)
            return
        named = ", ".join(
            f"{metric} {value:.6g}"
            for metric, value in zip(self.settings.metrics, values, strict=True)
        )
        if all(map(math.isfinite, values)):
            found.complete(job, values)
            print(f"trial {job.number}: {named}", flush=True)
        else:
            reason = f"an objective is no finite number: {named}"
            found.fail(job, reason, again=False)
            print(f"trial {job.number}: failed ({reason})", flush=True)

    def _values(self, job: TrialJob, returned: object) -> list[float]:
        """Return the objectives of a job that has ended."""
        if self.settings.metrics == (BEST,):
            if isinstance(returned, int | float):
                return [float(returned)]
            rule = "the search needs a validation metric, and the run has measured none"
            remedy = f"Give the data a validation split, or set {sweepers.NODE}.metrics."
            raise ConfigError.of(f"job {job.number:04}", rule, remedy)
        folder = study_files.job_folder(self.sweep_dir, job.number)
        summary = sessions.summary(folder)
        return study_files.values_of(summary, self.settings.metrics, folder)

    def _check_failures(self, found: Jobs) -> None:
        newest = found.newest().values()
        ended = [trial for trial in newest if trial.state.is_finished()]
        failed = sum(trial.state.name == "FAIL" for trial in ended)
        if ended and failed / len(ended) > self.settings.max_failure_rate:
            raise JobFailed(
                f"{failed} of {len(ended)} jobs have failed: more than "
                f"{sweepers.NODE}.max_failure_rate={self.settings.max_failure_rate}"
            )

    def _check_measured(self, found: Jobs) -> None:
        """Raise if no trial that has ended has the objective, as where its name is misspelt.

        Only once this command has tried a further one: each makes some progress.
        """
        ended = [n for n, trial in found.newest().items() if trial.state.is_finished()]
        if len(ended) > self._ended_before and self._unmeasured.keys() >= set(ended):
            raise self._unmeasured[min(ended)]

    def _time_is_up(self) -> bool:
        limit = self.settings.timeout
        return limit is not None and time.monotonic() - self._begin >= limit

    def _note_continued(self, found: Jobs) -> None:
        newest = found.newest()
        ended = sum(trial.state.is_finished() for trial in newest.values())
        self._ended_before = ended
        if newest:
            most = max(ended, self.settings.n_trials)
            print(f"The study goes on: {ended} of {most} trials have ended.")

    def _note_random_keys(self) -> None:
        name = self.settings.sampler["name"]
        found = [one.key for one in self.space.parameters if one.conditions or one.is_categorical]
        if name in optuna_study.NUMERIC and found:
            print(f"{name} samples {', '.join(found)} at random: lists and conditional keys.")


def _consecutive(batch: Sequence[TrialJob]) -> Iterator[list[TrialJob]]:
    """Yield runs of jobs whose numbers follow each other, as launchers count."""
    for _, group in itertools.groupby(enumerate(batch), lambda pair: pair[1].number - pair[0]):
        yield [job for _, job in group]


# -- what was found ------------------------------------------------------------------------


def show(
    study: optuna.Study,
    newest: Mapping[int, FrozenTrial],
    metrics: tuple[str, ...],
    config_name: str,
    console: Console | None = None,
) -> None:
    """Print the best trial, or the Pareto front of several objectives.

    Args:
        study: of all trials.
        newest: the trials of this sweep, by the number of their job.
        metrics: names of the objectives.
        config_name: of the recipes.
        console: where to; None: standard output.
    """
    console = console or PipedConsole(highlight=False, soft_wrap=True)
    states = Counter(trial.state for trial in newest.values())
    counts = ", ".join(
        f"{states[state]} {word}"
        for state, word in (
            (TrialState.COMPLETE, "complete"),
            (TrialState.PRUNED, "pruned"),
            (TrialState.FAIL, "failed"),
            (TrialState.RUNNING, "running"),
        )
        if states[state]
    )
    console.print(f"{len(newest)} trials: {counts or 'none'}")
    best = best_trials(newest, study)
    if not best:
        return
    if len(metrics) > 1:
        console.print(_front(best, metrics))
    for number, trial in best.items():
        values = ", ".join(
            f"{name} {value:.6g}" for name, value in zip(metrics, trial.values, strict=True)
        )
        console.print(
            f"{'best' if len(metrics) == 1 else 'Pareto-optimal'} trial {number}: {values}"
        )
        if metrics != (BEST,):  # else the table of the sweep names it
            console.print(f"  {command(trial.user_attrs[JOB]['overrides'], config_name)}")


def best_trials(newest: Mapping[int, FrozenTrial], study: optuna.Study) -> dict[int, FrozenTrial]:
    """Return the best trial of a sweep by the number of its job; of several objectives the front.

    A trial is in the front where no other is at least as good in all objectives and better in one.
    """
    signs = [1 if one.name == "MINIMIZE" else -1 for one in study.directions]
    costs = {
        number: tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))
        for number, trial in sorted(newest.items())
        if trial.state is TrialState.COMPLETE
    }
    if len(signs) == 1:
        best = min(costs, key=lambda number: costs[number], default=None)
        return {} if best is None else {best: newest[best]}
    front = [
        number
        for number, cost in costs.items()
        if not any(
            other != cost and all(a <= b for a, b in zip(other, cost, strict=True))
            for other in costs.values()
        )
    ]
    return {number: newest[number] for number in sorted(front, key=lambda n: costs[n])}


def command(overrides: Sequence[str], config_name: str) -> str:
    """Return the command that trains one job alone."""
    name = [] if config_name == hydra_setup.PRIMARY else ["--config-name", config_name]
    words = [*name, *overrides]
    return shlex.join(["python", "-m", "runner", *words])


def _front(best: Mapping[int, FrozenTrial], metrics: Sequence[str]) -> Table:
    keys = list(dict.fromkeys(key for trial in best.values() for key in trial.params))
    table = Table("trial", *metrics, *keys, title="Pareto front")
    for number, trial in best.items():
        values = [f"{value:.6g}" for value in trial.values]
        table.add_row(str(number), *values, *(_short(trial.params.get(key)) for key in keys))
    return table


def _short(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
