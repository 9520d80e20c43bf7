"""The sweeper `hydra/sweeper=optuna`: a search with Optuna over any of Hydra's launchers.

Jobs go to the launcher in batches of `n_jobs`; the number of a job is the one that Hydra gives it.
Free of torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import secrets
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import check_distribution_compatibility
from optuna.study import StudyDirection

from accel.machine.errors import ConfigError
from runner.recipe import composition, hydra_setup, processes, sweepers
from runner.run_dir import numerics
from runner.run_dir import study as study_files
from runner.run_dir.study import BEST, StudyFile
from runner.run_dir.sweep_records import FILE as SWEEP_JOURNAL
from runner.sweep import attempt, study_plan, study_report
from runner.sweep.job_errors import JobFailed, JobStopped
from runner.sweep.journal import Journal
from runner.sweep.launcher import instantiate_launcher
from runner.sweep.search_space import Space
from runner.sweep.settings import AUTO
from runner.sweep.study_settings import Settings
from runner.sweep.trial_jobs import Jobs, TrialJob, one_at_a_time
from runner.training import optuna_study
from runner.training.optuna_study import PRUNER

STUDY = "sweep"
OBJECTIVES = "objectives"  # attribute of a study
FOLDER = "folder of"  # and the mark of a sweep: attribute of a study that it may share
OBJECTIVE_KEYS = {"metrics": f"{sweepers.NODE}.metrics", "monitor": "checkpoint.monitor"}
DIRECTIONS = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}


def register() -> None:
    """Make the sweeper known to Hydra, which then makes one.

    Hydra takes plugins from the package `hydra_plugins` only, by name. The module of that name is
    there until the sweeper has been made: launchers pickle the list of plugins, and a class whose
    module is not there goes by value, so that their processes need not have the module.
    """
    Plugins.instance().register(OptunaSweeper)
    package = sweepers.MODULE.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    sys.modules[sweepers.MODULE] = types.ModuleType(sweepers.MODULE)
    setattr(sys.modules[sweepers.MODULE], sweepers.CLASS, OptunaSweeper)


class OptunaSweeper(Sweeper):
    """Hydra's interface to a search; its arguments are the keys of `hydra.sweeper`."""

    __module__ = sweepers.MODULE  # Hydra refuses plugins of other packages

    def __init__(self, **settings: object) -> None:
        sys.modules.pop(sweepers.MODULE, None)
        self._settings = settings
        self._launcher: Launcher | None = None
        self._config = OmegaConf.create()
        self._at_once = 1

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives, and make its launcher."""
        self._config = config
        self._at_once = _at_once(task_function)
        self._launcher = instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Search, from where an earlier command has left off.

        Raises:
            ConfigError: if the study of an earlier command searches another space, or its database
                fails.
            JobFailed: if too many jobs fail.
        """
        assert self._launcher is not None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        node = {name: _plain(value) for name, value in self._settings.items()}
        with hydra_setup.session():
            space = Space.read(arguments, node["params"], node["when"])
        settings = Settings.read(node)
        folder = study_plan.folder_of(self._config)
        config_name = str(self._config.hydra.job.config_name)
        if settings.n_jobs is None:
            settings = replace(settings, n_jobs=self._at_once)
        try:
            Search(settings, space, folder, config_name, self._launcher).run()
        except optuna_study.FAILURES as error:  # the database went away
            raise optuna_study.failed_database(str(settings.storage), error) from error


def _at_once(task: object) -> int:
    """Return how many jobs run at once on this machine; 1 under other launchers."""
    local = getattr(task, "local", None)
    if local is None:
        return 1
    if local.jobs == AUTO:
        return processes.num_accelerators() or numerics.cores()
    return int(local.jobs)


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
        with one_at_a_time(self.sweep_dir):  # the first command chooses the mark of all
            study, storage, mark = self._open()
        with Jobs(study, storage, self.settings, self.space, self.sweep_dir, mark) as found:
            self._rebuild(found)
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
            study_report.show(study, found.newest(), self.settings.metrics, self.config_name)

    # -- the study -------------------------------------------------------------------------

    def _open(self) -> tuple[optuna.Study, optuna.storages.BaseStorage, str]:
        """Create the study, or open that of an earlier command; return the mark of trials, too."""
        settings = self.settings
        modes, objectives = self._objectives()
        earlier = study_files.of_sweep(self.sweep_dir)
        reported = settings.reported
        place = settings.storage or study_files.JOURNAL
        if settings.storage and "://" not in settings.storage:
            place = str(Path.cwd() / settings.storage)
        mark = f"{self.sweep_dir.name}-{secrets.token_hex(4)}" if earlier is None else earlier.sweep
        own_name = mark if earlier is None or earlier.storage != place else earlier.name
        file = StudyFile(
            storage=place,
            name=settings.study_name or (own_name if settings.storage else STUDY),
            sweep=mark,
            metric=None if reported == BEST else reported,
            mode=None if reported is None else modes[0],
            pruner=settings.pruner or {},
            metrics=settings.metrics,
            modes=modes,
        )
        storage = optuna_study.storage_of(file.storage, self.sweep_dir)
        study = optuna.create_study(
            study_name=file.name,
            storage=storage,
            directions=[DIRECTIONS[mode] for mode in modes],
            pruner=optuna_study.make(PRUNER, settings.pruner),
            load_if_exists=True,
        )
        self._require_same(study, modes)
        self._require_same_objectives(study, objectives, earlier)
        if settings.storage:
            self._require_own(study, mark)
        if earlier is None and not settings.storage:  # the file was lost, not the journal
            file = replace(file, sweep=optuna_study.last_mark(study) or mark)
        file.write(self.sweep_dir)
        return study, storage, file.sweep

    def _require_own(self, study: optuna.Study, mark: str) -> None:
        """Raise if another folder goes on with the trials of this one, of which one is a copy."""
        key, here = f"{FOLDER} {mark}", str(self.sweep_dir.absolute())
        there = study.user_attrs.get(key)
        if there is not None and study_files.goes_on_in(Path(there), mark, self.sweep_dir):
            rule = f"its search goes on in {there}, and one of these folders is a copy of the other"
            remedy = f"Go on in {there}, or begin another sweep."
            raise ConfigError.of(f"sweep.dir={self.sweep_dir}", rule, remedy)
        if there != here:
            study.set_user_attr(key, here)

    def _rebuild(self, found: Jobs) -> None:
        """Rebuild trials that the study has lost, and say so."""
        held = bool(found.newest())
        monitor = (found.study.user_attrs.get(OBJECTIVES) or {}).get("monitor")
        rebuilt = found.rebuild(Journal(self.sweep_dir).states(), monitor)
        if not rebuilt:
            return
        lost = f"{study_files.JOURNAL} {'ended early' if held else 'was missing, or empty'}"
        if self.settings.storage is not None:
            lost = f"The study {found.study.study_name!r} lacked trials of this sweep"
        trials = "1 trial was" if len(rebuilt) == 1 else f"{len(rebuilt)} trials were"
        print(f"{lost}: {trials} rebuilt from {SWEEP_JOURNAL} and the runs' evaluations.")

    def _objectives(self) -> tuple[tuple[str, ...], dict[str, object]]:
        """Return "min" or "max" of each objective, and what tells them from those of others."""
        metrics = self.settings.metrics
        if BEST not in metrics:
            assert self.settings.modes is not None
            return self.settings.modes, {"metrics": list(metrics), "monitor": None}
        with hydra_setup.session():
            probe = composition.new_run(self.space.probes()[0], self.config_name)
        recipe = composition.require(probe)
        monitor, _ = study_plan.monitored(recipe)
        modes = study_plan.modes_of(self.settings, recipe)
        return modes, {"metrics": list(metrics), "monitor": monitor}

    def _require_same_objectives(
        self, study: optuna.Study, here: dict[str, object], earlier: StudyFile | None
    ) -> None:
        """Raise if values of the study's trials are of other metrics; note those of a new study."""
        there = study.user_attrs.get(OBJECTIVES)
        if there is None:
            if not study.get_trials(deepcopy=False):
                there = here
            elif earlier is not None and earlier.modes:  # begun by an older version
                there = {"metrics": list(earlier.metrics)}
            if there is not None:
                study.set_user_attr(OBJECTIVES, there)
        for key, what in OBJECTIVE_KEYS.items():
            before, now = (one.get(key) for one in (there or {}, here))
            if before is not None and now is not None and before != now:
                old, new = (", ".join(x) if isinstance(x, list) else x for x in (before, now))
                rule = f"trials of the study {study.study_name!r} are judged by {old}"
                remedy = f"Set {what}={old} again, or start another sweep"
                if self.settings.storage is not None:
                    remedy += f" with another {sweepers.NODE}.study_name"
                raise ConfigError.of(f"{what}={new}", rule, f"{remedy}.")

    def _require_same(self, study: optuna.Study, modes: Sequence[str]) -> None:
        """Raise if the study searches another space, or in another direction."""
        if study.directions != [DIRECTIONS[mode] for mode in modes]:
            rule = f"the study {study.study_name!r} has other directions"
            remedy = f"Give another {sweepers.NODE}.study_name, or the directions of that study."
            raise ConfigError.of(f"{sweepers.NODE}.directions={', '.join(modes)}", rule, remedy)
        wanted = {one.key: one.distribution for one in self.space.parameters}
        for trial in study.get_trials(deepcopy=False):
            for key, earlier in trial.distributions.items():
                if key not in wanted:
                    continue
                try:
                    check_distribution_compatibility(earlier, wanted[key])
                except ValueError as error:
                    rule = f"trials of {study.study_name!r} have {earlier}"
                    remedy = "Search the same values, or start another sweep."
                    raise ConfigError.of(f"{key}: {wanted[key]}", rule, remedy) from error

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
        summary = attempt.summary_of(folder)
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
