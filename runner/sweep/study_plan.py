"""A search before its first job: everything that can be wrong with it is told. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from accel.machine.errors import ConfigError, Problem, Problems, nearest
from accel.machine.imports import is_available
from runner.recipe import diagnose, hydra_setup, plugin_nodes, sweepers
from runner.recipe.schema import Recipe
from runner.run_dir.study import BEST

if TYPE_CHECKING:
    from runner.sweep.search_space import Space
    from runner.sweep.study_settings import Settings


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
    if not is_available("optuna"):
        rule = "it needs the package 'optuna', which is not installed"
        remedy = "Install it with `pip install 'accel-runner[optuna]'`."
        raise ConfigError.of(f"hydra/sweeper={chosen}", rule, remedy)
    from runner.sweep.search_space import Space
    from runner.sweep.study_settings import Settings

    problems = Problems(_unknown(overrides))
    problems.raise_if()
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
    import optuna

    from runner.training import optuna_study

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


def _unknown(overrides: Sequence[str]) -> list[Problem]:
    """Return the problems of keys of `hydra.sweeper` that there are none of."""
    keys = [hydra_setup.key_of(o).removeprefix(f"{sweepers.NODE}.") for o in overrides]
    given = zip(keys, overrides, strict=True)
    heads = {
        key.partition(".")[0]: override
        for key, override in given
        if hydra_setup.key_of(override).startswith(f"{sweepers.NODE}.")
    }
    return [
        Problem(override, f"{sweepers.NODE} has no such key", nearest(head, sweepers.DEFAULTS))
        for head, override in heads.items()
        if head not in sweepers.DEFAULTS
    ]


def recorded(overrides: Sequence[str], config_name: str, recipe: Recipe) -> dict[str, Any]:
    """Return what a sweep keeps of `hydra.sweeper`: all but what may change while it goes on.

    Inside a session, after `probes` has found the settings to be right.

    Args:
        overrides: of the command line.
        config_name: the primary config.
        recipe: the first job's.

    Raises:
        ConfigError: if the direction is not that of the monitored metric.
    """
    from runner.sweep.study_settings import Settings

    node = plugin_nodes.settings("sweeper", overrides, config_name)
    modes_of(Settings.read(node), recipe)
    kept = [key for key in sweepers.DEFAULTS if f"{sweepers.NODE}.{key}" not in sweepers.SCHEDULING]
    plain: dict[str, Any] = json.loads(json.dumps({key: node.get(key) for key in kept}))
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
    from runner.training.objective import Objective
    from runner.training.step import SupervisedStep

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


def folder_of(config: DictConfig) -> Path:
    """Return the folder of a sweep from Hydra's configuration."""
    return Path(str(config.hydra.sweep.dir)).expanduser().absolute()
