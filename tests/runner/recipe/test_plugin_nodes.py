"""C3: the launcher and the sweeper of a command line, and the runner's own ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError, MissingPackageError
from runner.recipe import composition, hydra_setup, launchers, plugin_nodes, sweepers

pytestmark = pytest.mark.usefixtures("hydra_session")


@pytest.mark.parametrize(
    ("overrides", "launcher", "sweeper"),
    [
        (["seed=1,2"], "basic", "basic"),
        (["~hydra/launcher", "seed=1,2"], "basic", "basic"),
        (["hydra/launcher=joblib", "seed=range(3)", "optimizer.lr=no_number"], "joblib", "basic"),
        (["hydra/sweeper=optuna", "callbacks=[no_file]"], "basic", "optuna"),
    ],
)
def test_the_launcher_and_the_sweeper_are_known_whatever_else_is_wrong(
    overrides: list[str], launcher: str, sweeper: str
) -> None:
    found = plugin_nodes.choices(overrides, "config")
    assert found == {"launcher": launcher, "sweeper": sweeper}


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("hydra.launcher.n_jobz=2", "Did you mean 'n_jobs'?"),
        ("hydra.sweeper.max_batch_sizes=2", "Did you mean 'max_batch_size'?"),
        ("hydra/launcher=ray hydra.launcher.num_cpu=1", "Did you mean 'num_cpus'?"),
        ("hydra/sweeper=optuna hydra.sweeper.n_trial=3", "Did you mean 'n_trials'?"),
    ],
)
def test_a_wrong_key_of_a_plugin_is_named(override: str, remedy: str) -> None:
    """R10: before there is a folder of the sweep."""
    with pytest.raises(ConfigError) as refused:
        plugin_nodes.choices(["hydra/launcher=joblib", *override.split(), "seed=1,2"], "config")
    (problem,) = refused.value.problems
    assert (problem.value, problem.remedy) == (override.split()[-1], remedy)


RAY = "hydra/launcher=ray"


def settings(*overrides: str) -> dict[str, Any]:
    with hydra_setup.session():
        return plugin_nodes.settings("launcher", [RAY, *overrides], "config")


def test_keys_are_those_of_the_launcher() -> None:
    found = settings("hydra.launcher.num_cpus=0.5", "hydra.launcher.address=head:6379")
    assert found.pop("_target_") == "hydra_plugins.accel_runner.RayLauncher"
    assert found.pop("_recursive_") is False
    given = {"num_cpus": 0.5, "address": "head:6379"}
    assert found == {**launchers.DEFAULTS, **given}
    assert launchers.problems_of(found) == []


def test_open_mappings_of_a_launcher_take_any_key() -> None:
    given = ("hydra.launcher.runtime_env.env_vars.WORD=a", "hydra.launcher.resources={tpu: 1}")
    found = settings(*given)
    assert found["runtime_env"] == {"env_vars": {"WORD": "a"}}
    assert found["resources"] == {"tpu": 1}


def test_everything_that_is_wrong_is_named() -> None:
    wrong = {"address": "ray://head:1", "num_cpus": -1, "num_gpus": "many", "resources": 3}
    values = [one.value for one in launchers.problems_of({**launchers.DEFAULTS, **wrong})]
    names = ("address=ray://head:1", "num_cpus=-1", "num_gpus=many", "resources=3")
    assert values == [f"hydra.launcher.{name}" for name in names]


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match=r"pip install 'accel-runner\[ray\]'"):
        launchers.require()


@pytest.mark.parametrize(("name", "sampler"), [("optuna", "tpe"), ("random", "random")])
def test_hydra_knows_the_sweepers(name: str, sampler: str) -> None:
    given = [f"hydra/sweeper={name}", "hydra.sweeper.n_trials=3", "seed=1,2"]
    with hydra_setup.session():
        found = plugin_nodes.settings("sweeper", given, "config")
    assert sweepers.is_own(found)
    assert found["sampler"] == {"name": sampler}
    assert found["n_trials"] == 3
    assert set(sweepers.DEFAULTS) == {key for key in found if key[0] != "_"}


RANGES = """\
# @package _global_
{defaults}
hydra:
  sweeper:
    params:
      optimizer.lr: interval(0, 1)
"""
OVERRIDE = "defaults:\n  - override /hydra/sweeper: optuna"


@pytest.mark.parametrize(("defaults", "allowed"), [(OVERRIDE, True), ("", False)])
def test_a_file_gives_ranges_where_it_chooses_the_search(
    defaults: str, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(RANGES.format(defaults=defaults))
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = composition.new_run(["experiment=mine"], "config")
        if allowed:
            given = plugin_nodes.settings("sweeper", ["experiment=mine"], "config")
            assert given["params"] == {"optimizer.lr": "interval(0, 1)"}
    assert (found.problems == []) == allowed
    if not allowed:
        assert "- override /hydra/sweeper: optuna" in found.problems[0].remedy
