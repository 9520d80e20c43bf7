"""Settings of a search, `hydra.sweeper`: everything that can be wrong with it is told at once.

Free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from accel.machine.errors import ConfigError, Problems, nearest
from accel.machine.imports import is_available
from runner.recipe import diagnose, plugin_nodes, sweepers
from runner.recipe.schema import Recipe
from runner.recipe.sweepers import NODE
from runner.recipe.units import parse_duration
from runner.sweep.objectives import BEST, NUMBERS, SPLITS
from runner.sweep.optuna.space import Space
from runner.training import optuna_study
from runner.training.optuna_study import PRUNER, SAMPLER

CMAES = "cmaes"
JOURNAL = "optuna.journal"  # in the sweep's folder
DIRECTIONS = {"minimize": "min", "maximize": "max", "min": "min", "max": "max"}


@dataclass(frozen=True)
class Settings:
    """A search: how many jobs, of which objectives, chosen and pruned by whom.

    Attributes:
        metrics: the objectives, of which "best" is the monitored validation metric's best value.
        modes: "min" or "max" of each; None: as the run's monitored metric has it.
        sampler: its name and arguments.
        pruner: likewise; None: nothing is pruned.
        timeout: seconds after which no further job is started; None: never.
        others: as `compose.sweepers.OptunaConf` has them.
    """

    n_trials: int
    n_jobs: int | None
    metrics: tuple[str, ...]
    modes: tuple[str, ...] | None
    sampler: Mapping[str, object]
    pruner: Mapping[str, object] | None
    seed: int | None
    study_name: str | None
    storage: str | None
    max_failure_rate: float
    timeout: float | None

    @classmethod
    def read(cls, node: Mapping[str, object]) -> Settings:
        """Return the settings of `hydra.sweeper`.

        Raises:
            ConfigError: naming everything that is wrong.
        """
        problems = Problems()
        metrics = _metrics(node["metrics"], problems)
        modes = _modes(node["direction"], node["directions"], metrics, problems)
        sampler, pruner = (_named(kind, node[kind], problems) for kind in (SAMPLER, PRUNER))
        if sampler is None and not problems:
            rule, remedy = "a sampler chooses the jobs", "Choose sampler=tpe or sampler=random."
            problems.add(f"{NODE}.sampler={node['sampler']}", rule, remedy)
        _check_several(metrics, sampler, pruner, problems)
        n_trials = _whole("n_trials", node["n_trials"], 1, problems)
        n_jobs = None if node["n_jobs"] is None else _whole("n_jobs", node["n_jobs"], 1, problems)
        seed = None if node["seed"] is None else _whole("seed", node["seed"], 0, problems)
        name, storage = (_text(key, node[key], problems) for key in ("study_name", "storage"))
        rate = _rate(node["max_failure_rate"], problems)
        try:
            timeout = parse_duration(node["timeout"], f"{NODE}.timeout")
        except ConfigError as error:
            problems += error.problems
        problems.raise_if()
        assert sampler is not None
        return cls(
            *(n_trials, n_jobs, metrics, modes, sampler, pruner),
            *(seed, name, storage, rate, timeout),
        )


def _metrics(given: object, problems: Problems) -> tuple[str, ...]:
    listed = [BEST] if given is None else given if isinstance(given, list) else [given]
    known = (BEST, *NUMBERS)
    for metric in listed:
        split, slash, name = str(metric).partition("/")
        if metric in known or (slash and split in SPLITS and name):
            continue
        rule = f"it is one of {', '.join(known)}, validation/<metric> and test/<metric>"
        meant = nearest(str(metric), [*known, *(f"{one}/{name or split}" for one in SPLITS)])
        problems.add(f"{NODE}.metrics={metric}", rule, meant)
    if {str(one).partition("/")[0] for one in listed}.issuperset(SPLITS):
        rule = "validation and test are measured with different weights"
        problems.add(f"{NODE}.metrics={given}", rule, "Give objectives of one split.")
    if len(set(map(str, listed))) < len(listed) or not listed:
        problems.add(f"{NODE}.metrics={given}", "it names each objective once", "Correct it.")
    return tuple(map(str, listed))


def _modes(
    direction: object, directions: object, metrics: tuple[str, ...], problems: Problems
) -> tuple[str, ...] | None:
    if direction is not None and directions is not None:
        rule, remedy = "one of both is given", f"Leave {NODE}.direction out."
        problems.add(f"{NODE}.direction={direction} with directions={directions}", rule, remedy)
        return None
    given = directions if directions is not None else direction
    if given is None:
        if metrics != (BEST,):
            value = f"{NODE}.metrics={', '.join(metrics)}"
            rule = "whether less or more of it is better is given with it"
            listed = ", ".join("minimize" for _ in metrics)
            problems.add(value, rule, f"Give {NODE}.directions=[{listed}] or maximize.")
        return None
    listed_ = given if isinstance(given, list) else [given]
    for one in listed_:
        if str(one).lower() not in DIRECTIONS:
            rule, meant = "it is minimize or maximize", nearest(str(one), DIRECTIONS)
            problems.add(f"{NODE}.direction={one}", rule, meant)
    if len(listed_) != len(metrics):
        rule = f"there is one for each of the {len(metrics)} metrics ({', '.join(metrics)})"
        remedy = f"Give {NODE}.directions and {NODE}.metrics as lists of the same length."
        problems.add(f"{NODE}.directions={given}", rule, remedy)
    return tuple(DIRECTIONS.get(str(one).lower(), "min") for one in listed_)


def _named(kind: str, given: object, problems: Problems) -> dict[str, object] | None:
    try:
        spec = optuna_study.normalized(kind, given)
        if spec is not None and spec["name"] == CMAES and not is_available(CMAES):
            rule = f"it needs the package {CMAES!r}, which is not installed"
            problems.add(f"{NODE}.sampler={CMAES}", rule, f"Install it with `pip install {CMAES}`.")
        elif spec is not None:
            optuna_study.make(kind, spec)
        return spec
    except ConfigError as error:
        problems += error.problems
        return None


def _check_several(
    metrics: tuple[str, ...],
    sampler: Mapping[str, object] | None,
    pruner: Mapping[str, object] | None,
    problems: Problems,
) -> None:
    several = f"{NODE}.metrics={', '.join(metrics)}"
    if pruner is not None and len(metrics) > 1:
        rule = "runs are pruned by one objective only"
        problems.add(f"{NODE}.pruner={pruner['name']} with {several}", rule, "Leave one out.")
    elif pruner is not None and not metrics[0].startswith((BEST, "validation/")):
        rule = "runs are pruned by a validation metric"
        problems.add(f"{NODE}.pruner={pruner['name']} with {several}", rule, "Leave one out.")
    if sampler is not None and sampler["name"] in optuna_study.SINGLE_OBJECTIVE and metrics[1:]:
        rule, remedy = "it optimizes one objective", "Choose sampler=tpe or sampler=nsgaii."
        problems.add(f"{NODE}.sampler={sampler['name']} with {several}", rule, remedy)


def _whole(name: str, value: object, least: int, problems: Problems) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = f"it is a whole number of at least {least}"
        problems.add(f"{NODE}.{name}={value}", rule, f"Give {NODE}.{name}={max(least, 20)}.")
        return least
    return value


def _rate(value: object, problems: Problems) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        rule, remedy = "it is a part between 0 and 1", "Give 0.5 to end where half of them fail."
        problems.add(f"{NODE}.max_failure_rate={value}", rule, remedy)
        return 1.0
    return float(value)


def _text(name: str, value: object, problems: Problems) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        problems.add(f"{NODE}.{name}={value}", "it is a text", "Leave it out, or give a name.")
        return None
    return value


# -- before the first job ------------------------------------------------------------------


def probes(overrides: Sequence[str], config_name: str, chosen: str) -> list[list[str]]:
    """Return the jobs to compose and check before a search begins, inside a session.

    Every value of a list stands in one of them, both ends of every range and, of an interval, a
    fraction between them.

    Args:
        overrides: of the command line.
        config_name: the primary config.
        chosen: `hydra/sweeper`.

    Raises:
        ConfigError: naming everything that is wrong with the settings and the ranges.
    """
    problems = Problems()
    try:
        node = plugin_nodes.settings("sweeper", overrides, config_name)
    except diagnose.MISTAKES as error:
        raise ConfigError(*diagnose.translate(error, config_name)) from error
    try:
        settings = Settings.read(node)
    except ConfigError as error:
        problems.take(error)
    try:
        space = Space.read(overrides, node["params"], node["when"], chosen)
    except ConfigError as error:
        problems.take(error)
    problems.raise_if()
    _try(settings, space)
    return space.probes()


def _try(settings: Settings, space: Space) -> None:
    """Raise a ConfigError if the sampler refuses the space, as a sampler of grids an interval."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        sampler = optuna_study.make(optuna_study.SAMPLER, settings.sampler)
        study = optuna.create_study(directions=["minimize"] * len(settings.metrics))
        study.sampler = sampler
        space.sample(study.ask())
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        value = f"{sweepers.NODE}.sampler={settings.sampler['name']}"
        rule = f"Optuna refuses what is searched ({' '.join(str(error).split())})"
        raise ConfigError.of(value, rule, "Choose another sampler or other ranges.") from error
    finally:
        optuna.logging.set_verbosity(verbosity)


def recorded(
    overrides: Sequence[str], config_name: str, recipe: Recipe, name: str
) -> dict[str, Any]:
    """Return what a sweep keeps of `hydra.sweeper`: all but what may change while it goes on.

    Inside a session, after `probes` has found the settings to be right.

    Args:
        overrides: of the command line.
        config_name: the primary config.
        recipe: the first job's.
        name: of the study, where none is given.

    Raises:
        ConfigError: if the direction is not that of the monitored metric.
    """
    node = plugin_nodes.settings("sweeper", overrides, config_name)
    settings = Settings.read(node)
    storage = settings.storage or JOURNAL
    if settings.storage and "://" not in storage:
        storage = str(Path.cwd() / storage)
    kept = [key for key in sweepers.DEFAULTS if f"{sweepers.NODE}.{key}" not in sweepers.SCHEDULING]
    read = {
        "storage": storage,
        "study_name": settings.study_name or name,
        "metrics": settings.metrics,
        "modes": modes_of(settings, recipe),
    }
    plain: dict[str, Any] = json.loads(json.dumps({key: node.get(key) for key in kept} | read))
    return plain


def modes_of(settings: Settings, recipe: Recipe) -> tuple[str, ...]:
    """Return "min" or "max" of each objective.

    Args:
        settings: of the search.
        recipe: of one of its jobs.

    Raises:
        ConfigError: if that of the monitored metric is not known, or the other one.
    """
    given = settings.modes
    if BEST not in settings.metrics:
        assert given is not None
        return given
    index, (_, known) = settings.metrics.index(BEST), monitored(recipe)
    if given is None and known is None:
        raise ConfigError.of(
            f"{sweepers.NODE}.direction",
            "the step decides whether less or more of its metric is better",
            f"Give {sweepers.NODE}.direction=minimize or maximize.",
        )
    if given is not None and known is not None and given[index] != known:
        several = len(settings.metrics) > 1
        listed = ", ".join(f"{mode}imize" for mode in given)
        written = f"directions=[{listed}]" if several else f"direction={listed}"
        raise ConfigError.of(
            f"{sweepers.NODE}.{written}",
            f"the best of the monitored metric is the {known}imum",
            f"Give {known}imize for {BEST}, or set checkpoint.monitor and checkpoint.mode."
            if several
            else "Leave it out, or set checkpoint.monitor and checkpoint.mode.",
        )
    return given or (str(known),)


def monitored(recipe: Recipe) -> tuple[str | None, str | None]:
    """Return the name of a run's monitored metric, and whether its best is the "max" or the "min".

    None: it is known only once the run has been built.
    """
    from runner.recipe.factory import factory_of
    from runner.recipe.registry import register
    from runner.training.step import Objective, SupervisedStep

    checkpoint = recipe.checkpoint
    if checkpoint.monitor is not None and checkpoint.mode is not None:
        return str(checkpoint.monitor), str(checkpoint.mode)
    step = factory_of("step", recipe.step, register.step).function
    source: object = step
    if isinstance(step, type) and issubclass(step, SupervisedStep):
        source = factory_of("objective", recipe.objective, register.objective).function
    if not isinstance(source, type) or not (source is step or issubclass(source, Objective)):
        source = None
    name, mode = (getattr(source, key, None) for key in ("monitor", "mode"))
    return (
        checkpoint.monitor or (name if isinstance(name, str) else None),
        str(checkpoint.mode or mode) if (checkpoint.mode or mode) in ("min", "max") else None,
    )
