"""A search before its first job: everything that can be wrong with it is told. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from accel.errors import ConfigError, Problem, Problems, nearest
from accel.imports import is_available
from runner.compose import diagnose, hydra_setup, sweepers
from runner.config.schema import Recipe

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
        node = hydra_setup.plugin_settings("sweeper", overrides, config_name)
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


def monitored_mode(recipe: Recipe) -> str | None:
    """Return whether the best of a run's monitored metric is the "max" or the "min".

    None: it is known only once the run has been built.
    """
    from runner.build.factory import factory_of
    from runner.factories.registry import register
    from runner.training.objective import Objective
    from runner.training.step import SupervisedStep

    if recipe.checkpoint.mode is not None:
        return str(recipe.checkpoint.mode)
    step = factory_of("step", recipe.step, register.step).function
    source: object = step
    if isinstance(step, type) and issubclass(step, SupervisedStep):
        source = factory_of("objective", recipe.objective, register.objective).function
    if not isinstance(source, type) or not (source is step or issubclass(source, Objective)):
        return None
    mode = getattr(source, "mode", None)
    return str(mode) if mode in ("min", "max") else None


def folder_of(config: DictConfig) -> Path:
    """Return the folder of a sweep from Hydra's configuration."""
    return Path(str(config.hydra.sweep.dir)).expanduser().absolute()
