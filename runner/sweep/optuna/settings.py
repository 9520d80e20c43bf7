"""Before the first job of a search: its settings and ranges are checked, and what it keeps.

Free of torch, unless the recipe leaves the direction to its step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna

from accel.machine import passwords
from accel.machine.errors import ConfigError, Problems
from runner.recipe.plugins import BEST, SCHEDULING, SWEEPER, SearchConf, name_of
from runner.recipe.schema import Recipe
from runner.sweep.optuna.space import Space
from runner.training import optuna_study
from runner.training.optuna_study import PRUNER, SAMPLER

JOURNAL = "optuna.journal"  # in the sweep's folder


def read(node: Mapping[str, Any]) -> SearchConf:
    """Return `hydra.sweeper`, of which `node` is a plain container with its interpolations.

    Raises:
        ConfigError: naming everything that is wrong with its values.
    """
    problems = Problems()
    found = problems.collect(lambda: SearchConf(**node)) or SearchConf()
    problems.collect(lambda: optuna_study.make(SAMPLER, node[SAMPLER], seed=0))
    problems.collect(optuna_study.make, PRUNER, node[PRUNER])
    storage = str(node["storage"])
    if passwords.without_passwords(storage) != storage:  # a sweep's files keep the address
        rule = "no password is written"
        remedy = f"Write {SWEEPER}.storage='${{oc.env:STUDY}}', and set STUDY in the environment."
        problems.add(f"{SWEEPER}.storage={passwords.without_passwords(storage)}", rule, remedy)
    problems.raise_if()
    return found


def probes(node: Mapping[str, Any], overrides: Sequence[str], chosen: str) -> list[list[str]]:
    """Return the jobs to compose and check before a search begins, inside a session.

    Every value of a list stands in one of them, both ends of every range and, of an interval, a
    fraction between them.

    Args:
        node: `hydra.sweeper`, with its interpolations.
        overrides: of the command line.
        chosen: `hydra/sweeper`.

    Raises:
        ConfigError: naming everything that is wrong with the settings and the ranges.
    """
    found = read(node)
    space = Space.read(overrides, found.params, found.when, chosen)
    _try(found, space)
    return space.probes()


def _try(found: SearchConf, space: Space) -> None:
    """Raise a ConfigError if the sampler refuses the space or the number of objectives."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(directions=["minimize"] * len(found.metrics))
        study.sampler = optuna_study.make(SAMPLER, found.sampler)
        space.sample(study.ask())
    except ValueError as error:
        value = f"{SWEEPER}.sampler={name_of(found.sampler)}"
        rule = f"Optuna refuses what is searched ({' '.join(str(error).split())})"
        raise ConfigError.of(value, rule, "Choose another sampler or other ranges.") from error


def recorded(node: Mapping[str, Any], recipe: Recipe, name: str) -> dict[str, Any]:
    """Return what a sweep keeps of `hydra.sweeper`: all but what may change while it goes on.

    Args:
        node: `hydra.sweeper`, with its interpolations.
        recipe: the first job's.
        name: of the study, where none is given.

    Raises:
        ConfigError: if the direction is not that of the monitored metric.
    """
    found = read(node)
    storage = found.storage or JOURNAL
    if found.storage and "://" not in optuna_study.address_of(storage):
        storage = str(Path.cwd() / storage)
    kept = {
        key: value
        for key, value in asdict(found).items()
        if key[0] != "_" and f"{SWEEPER}.{key}" not in SCHEDULING
    }
    own = {"storage": storage, "study_name": found.study_name or name}
    plain: dict[str, Any] = json.loads(json.dumps(kept | own | {"modes": _modes(found, recipe)}))
    return plain


def _modes(found: SearchConf, recipe: Recipe) -> list[str]:
    """Return "min" or "max" of each objective.

    Raises:
        ConfigError: if that of the monitored metric is not known, or the other one.
    """
    modes = [one[:3] for one in found.direction]
    if BEST not in found.metrics:
        return modes
    known = _mode_of(recipe)
    given = modes[found.metrics.index(BEST)] if modes else known
    if given is None:
        rule = "the step decides whether less or more of its metric is better"
        remedy = f"Give {SWEEPER}.direction=minimize or maximize."
        raise ConfigError.of(f"{SWEEPER}.direction=null", rule, remedy)
    if known not in (None, given):
        rule = f"the best of the monitored metric is the {known}imum"
        remedy = f"Give {known}imize for {BEST}, or set checkpoint.monitor and checkpoint.mode."
        shown = found.direction[0] if len(modes) == 1 else found.direction
        raise ConfigError.of(f"{SWEEPER}.direction={shown}", rule, remedy)
    return modes or [given]


def _mode_of(recipe: Recipe) -> str | None:
    """Return whether the best of a run's monitored metric is the "max" or the "min".

    None: it is known only once the run has been built.
    """
    from runner.recipe.factory import factory_of, register
    from runner.training.step import SupervisedStep

    if recipe.checkpoint.mode is not None:
        return str(recipe.checkpoint.mode)
    source: object = factory_of("step", recipe.step, register.step).function
    if isinstance(source, type) and issubclass(source, SupervisedStep):
        source = factory_of("objective", recipe.objective, register.objective).function
    mode = getattr(source, "mode", None)
    return mode if mode in ("min", "max") else None
