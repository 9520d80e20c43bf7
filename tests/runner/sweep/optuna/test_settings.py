"""S4, C1: settings of a search are examined before its first job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import composition, hydra_setup, sweepers
from runner.sweep import plan
from runner.sweep.optuna import settings
from runner.sweep.optuna.settings import Settings


def read(**changes: object) -> Settings:
    return Settings.read({**sweepers.DEFAULTS, **changes})


def test_the_defaults_are_a_search_of_the_monitored_metric() -> None:
    found = read()
    assert (found.metrics, found.modes) == (("best",), None)
    assert found.sampler == {"name": "tpe"}
    assert found.pruner is None


def test_names_are_taken_in_any_spelling() -> None:
    assert read(sampler="CmaEsSampler").sampler == {"name": "cmaes"}
    assert read(pruner="successive_halving").pruner == {"name": "successivehalving"}
    assert read(pruner={"name": "asha", "reduction_factor": 2}).pruner == {
        "name": "successivehalving",
        "reduction_factor": 2,
    }
    wrapped = {"name": "patient", "patience": 2, "wrapped_pruner": "median"}
    assert read(pruner=wrapped).pruner == wrapped
    assert read(pruner="none").pruner is None


def test_several_objectives_have_a_direction_each() -> None:
    found = read(
        metrics=["validation/loss", "samples_per_second"], directions=["minimize", "maximize"]
    )
    assert found.modes == ("min", "max")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "tpee"}, "Did you mean 'tpe'"),
        ({"sampler": "grid"}, "a grid needs no sampler"),
        ({"sampler": {"name": "tpe", "seed": 3}}, "Write hydra.sweeper.seed=3"),
        ({"pruner": "medain"}, "Did you mean 'median'"),
        ({"pruner": {"name": "percentile", "percentile": 300.0}}, "Optuna refuses it"),
        ({"direction": "minimize", "directions": ["minimize"]}, "one of both"),
        ({"directions": ["minimize", "maximize"]}, "one for each of the 1 metrics"),
        ({"metrics": ["validation/loss", "seconds"]}, "less or more of it is better"),
        ({"metrics": "secods", "direction": "minimize"}, "Did you mean 'seconds'"),
        ({"metrics": ["best", "best"], "directions": ["min", "min"]}, "names each objective once"),
        (
            {"metrics": ["validation/a", "test/a"], "directions": ["min", "min"]},
            "Give objectives of one split",
        ),
        ({"n_trials": 0}, "a whole number of at least 1"),
        (
            {"metrics": ["best", "seconds"], "directions": ["max", "min"], "pruner": "median"},
            "by one objective only",
        ),
        ({"metrics": "seconds", "direction": "min", "pruner": "median"}, "a validation metric"),
        (
            {"metrics": ["best", "seconds"], "directions": ["max", "min"], "sampler": "cmaes"},
            "it optimizes one objective",
        ),
    ],
)
def test_a_mistake_is_told(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read(n_trials=0, sampler="tpee", direction="up")
    assert len(caught.value.problems) == 3


# -- before the first job ----------------------------------------------------------------


LR = "optimizer.lr=tag(log, interval(1e-4, 1e-1))"


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with hydra_setup.session():
        yield


def probes(*overrides: str) -> list[list[str]]:
    return settings.probes(["hydra/sweeper=optuna", *overrides], "config", "optuna")


def test_jobs_to_check_hold_no_override_of_hydra() -> None:
    found = probes(LR, "optimizer=adamw,sgd", "hydra.sweeper.n_trials=3")
    assert not [one for job in found for one in job if one.startswith("hydra")]
    assert ["optimizer.lr=0.1", "optimizer=adamw"] in found


def test_ranges_stand_in_params_as_well() -> None:
    found = probes("hydra.sweeper.params={optimizer.lr: 'interval(0,1)', seed: '1,2'}")
    assert {"optimizer.lr=1.0", "seed=2"} <= {one for job in found for one in job}
    nested = probes("hydra.sweeper.params.optimizer.lr='interval(0,1)'")
    assert ["optimizer.lr=1.0"] in nested


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("seed=1,2", "hydra.sweeper.sampler=bruteforce"), "a grid needs no sampler"),
        (("seed=3",), "searches no key"),
        ((LR, "hydra.sweeper.when={optimizer.momentun: 'optimizer=sgd'}"), "swept key"),
    ],
)
def test_a_mistake_is_told_of_plan(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probes(*overrides)


def test_without_the_package_its_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "is_available", lambda package: False)
    choice = plan.Choice("basic", "optuna")
    with pytest.raises(ConfigError, match=r"accel-runner\[optuna\]"):
        plan.lists([LR], choice, plan.Settings())


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
    assert settings.monitored(recipe)[1] == mode


def test_a_sweep_keeps_the_settings_but_for_scheduling() -> None:
    line = ["hydra/sweeper=optuna", LR, "hydra.sweeper.n_trials=3", "hydra.sweeper.seed=5"]
    recipe = composition.require(composition.new_run((), "config"))
    kept = settings.recorded(line, "config", recipe, "s")
    assert (kept["seed"], kept["sampler"]) == (5, {"name": "tpe"})
    assert not {"n_trials", "n_jobs", "timeout", "max_failure_rate"} & kept.keys()
    with pytest.raises(ConfigError, match="direction=maximize: the best of the monitored metric"):
        settings.recorded([*line, "hydra.sweeper.direction=maximize"], "config", recipe, "s")
