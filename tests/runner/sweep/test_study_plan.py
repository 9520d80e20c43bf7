"""A search is examined before its first job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from accel.machine.errors import ConfigError
from runner.recipe import composition, hydra_setup
from runner.sweep import study_plan

LR = "optimizer.lr=tag(log, interval(1e-4, 1e-1))"


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with hydra_setup.session():
        yield


def probes(*overrides: str) -> list[list[str]]:
    return study_plan.probes(["hydra/sweeper=optuna", *overrides], "config", "optuna")


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
        ((LR, "hydra.sweeper.n_trial=3"), "Did you mean 'n_trials'"),
        ((LR, "hydra.sweeper.sampler=tpee"), "Did you mean 'tpe'"),
        (("optimizer.lr=interval(0,1)", "hydra.sweeper.sampler=bruteforce"), "Optuna refuses"),
        (("seed=3",), "searches no key"),
        ((LR, "hydra.sweeper.when={optimizer.momentun: 'optimizer=sgd'}"), "swept key"),
        (("optimizer.lr=interval(1,0)", "hydra.sweeper.n_trials=0"), "at least 1"),
    ],
)
def test_a_mistake_is_told(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probes(*overrides)


def test_without_the_package_its_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_plan, "is_available", lambda package: False)
    with pytest.raises(ConfigError, match=r"accel-runner\[optuna\]"):
        probes(LR)


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
    assert study_plan.monitored(recipe)[1] == mode


def test_a_sweep_keeps_the_settings_but_for_scheduling() -> None:
    line = ["hydra/sweeper=optuna", LR, "hydra.sweeper.n_trials=3", "hydra.sweeper.seed=5"]
    recipe = composition.require(composition.new_run((), "config"))
    kept = study_plan.recorded(line, "config", recipe)
    assert (kept["seed"], kept["sampler"]) == (5, {"name": "tpe"})
    assert not {"n_trials", "n_jobs", "timeout", "max_failure_rate"} & kept.keys()
    with pytest.raises(ConfigError, match="direction=maximize: the best of the monitored metric"):
        study_plan.recorded([*line, "hydra.sweeper.direction=maximize"], "config", recipe)


def test_the_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": "here"}}})
    assert study_plan.folder_of(config) == tmp_path / "here"
