"""S4, C1: settings of a search are examined before its first job."""

from __future__ import annotations

from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import composition
from runner.recipe.schema import Recipe
from runner.sweep import plan
from runner.sweep.optuna import settings

SEARCH = "hydra/sweeper=optuna"
LR = "optimizer.lr=tag(log, interval(1e-4, 1e-1))"


pytestmark = pytest.mark.usefixtures("hydra_session")


def node(overrides: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = plan.read(overrides, "config").nodes["hydra.sweeper"]
    return found


def probes(*overrides: str) -> list[list[str]]:
    given = [SEARCH, *overrides]
    return settings.probes(node(given), given, "optuna")


def recorded(recipe: Recipe, *overrides: str) -> dict[str, Any]:
    return settings.recorded(node([SEARCH, LR, *overrides]), recipe, "s")


def test_jobs_to_check_hold_no_override_of_hydra() -> None:
    found = probes(LR, "optimizer=adamw,sgd", "hydra.sweeper.n_trials=3")
    assert not [one for job in found for one in job if one.startswith("hydra")]
    assert ["optimizer.lr=0.1", "optimizer=adamw"] in found


def test_ranges_stand_in_params_as_well() -> None:
    found = probes("hydra.sweeper.params={optimizer.lr: 'interval(0,1)', seed: '1,2'}")
    assert {"optimizer.lr=1.0", "seed=2"} <= {one for job in found for one in job}
    nested = probes("hydra.sweeper.params.optimizer.lr='interval(0,1)'")
    assert ["optimizer.lr=1.0"] in nested


SEVERAL = ("hydra.sweeper.metrics=[best,seconds]", "hydra.sweeper.direction=[minimize,minimize]")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((LR, "hydra.sweeper.sampler=tpee"), "Did you mean 'tpe'"),
        ((LR, "hydra.sweeper.sampler={name: tpe, seed: 3}"), "Optuna refuses it .*seed"),
        ((LR, "hydra.sweeper.sampler.multivariat=true"), "arguments of tpe are .*multivariate"),
        ((LR, "hydra.sweeper.pruner=medain"), "Did you mean 'median'"),
        ((LR, "hydra.sweeper.pruner={name: percentile, percentile: 300.0}"), "Optuna refuses it"),
        ((LR, *SEVERAL, "hydra.sweeper.sampler=cmaes"), "Optuna refuses what is searched"),
        ((LR, "hydra.sweeper.n_trials=0", "hydra.sweeper.pruner=no"), "at least 1(.|\n)*one of"),
    ],
)
def test_a_mistake_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probes(*overrides)


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (("checkpoint.monitor=accuracy", "checkpoint.mode=max"), "max"),
        ((), "min"),
        (("experiment=bytes_gpt",), "min"),
    ],
)
def test_the_recipe_says_what_is_better(overrides: tuple[str, ...], mode: str) -> None:
    recipe = composition.require(composition.new_run(overrides, "config"))
    assert recorded(recipe)["modes"] == [mode]


def test_a_sweep_keeps_the_settings_but_for_scheduling() -> None:
    recipe = composition.require(composition.new_run((), "config"))
    kept = recorded(recipe, "hydra.sweeper.n_trials=3", "hydra.sweeper.seed=5")
    assert (kept["seed"], kept["sampler"]) == (5, {"name": "tpe"})
    assert not {"n_trials", "n_jobs", "timeout"} & kept.keys()
    with pytest.raises(ConfigError, match="direction=maximize: the best of the monitored metric"):
        recorded(recipe, "hydra.sweeper.direction=maximize")
