"""Settings of a search, and the mistakes one makes with them."""

from __future__ import annotations

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import sweepers
from runner.sweep.study_settings import Settings


def read(**changes: object) -> Settings:
    return Settings.read({**sweepers.DEFAULTS, **changes})


def test_the_defaults_are_a_search_of_the_monitored_metric() -> None:
    found = read()
    assert (found.metrics, found.modes, found.reported) == (("best",), None, "best")
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
    assert found.reported is None


def test_one_validation_metric_is_reported() -> None:
    found = read(metrics="validation/loss", direction="minimize", timeout="01:00:00")
    assert (found.reported, found.timeout) == ("loss", 3600.0)
    assert read(metrics="seconds", direction="min").reported is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "tpee"}, "Did you mean 'tpe'"),
        ({"sampler": "grid"}, "a grid needs no sampler"),
        ({"sampler": None}, "a sampler chooses the jobs"),
        ({"sampler": {"name": "tpe", "n_startup": 3}}, "Did you mean 'n_startup_trials'"),
        ({"sampler": {"name": "tpe", "seed": 3}}, "Write hydra.sweeper.seed=3"),
        ({"pruner": "medain"}, "Did you mean 'median'"),
        ({"pruner": {"patience": 3}}, "Give hydra.sweeper.pruner.name"),
        ({"pruner": {"name": "percentile", "percentile": 300.0}}, "Optuna refuses it"),
        ({"pruner": "percentile"}, "Optuna refuses it"),
        ({"direction": "minimise"}, "Did you mean 'minimize'"),
        ({"direction": "minimize", "directions": ["minimize"]}, "one of both"),
        ({"directions": ["minimize", "maximize"]}, "one for each of the 1 metrics"),
        ({"metrics": ["validation/loss", "seconds"]}, "less or more of it is better"),
        ({"metrics": "secods", "direction": "minimize"}, "Did you mean 'seconds'"),
        ({"metrics": ["best", "best"], "directions": ["min", "min"]}, "names each objective once"),
        ({"n_trials": 0}, "a whole number of at least 1"),
        ({"n_jobs": "two"}, "a whole number of at least 1"),
        ({"seed": -1}, "a whole number of at least 0"),
        ({"max_failure_rate": 2}, "between 0 and 1"),
        ({"timeout": "1h"}, "HH:MM:SS"),
        ({"storage": 3}, "it is a text"),
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
