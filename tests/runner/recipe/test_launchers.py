"""The launcher on a Ray cluster, as Hydra's configuration knows it."""

from __future__ import annotations

from typing import Any

import pytest

from accel.machine.errors import MissingPackageError
from runner.recipe import hydra_setup, launchers, plugin_nodes

RAY = "hydra/launcher=ray"


def settings(*overrides: str) -> dict[str, Any]:
    with hydra_setup.session():
        return plugin_nodes.settings("launcher", [RAY, *overrides], "config")


def test_keys_are_those_of_the_launcher() -> None:
    found = settings("hydra.launcher.num_cpus=0.5", "hydra.launcher.address=head:6379")
    assert found.pop("_target_") == "hydra_plugins.runner_sweep.RayLauncher"
    assert found.pop("_recursive_") is False
    given = {"num_cpus": 0.5, "address": "head:6379"}
    assert found == {**launchers.DEFAULTS, **given}
    assert launchers.problems_of(found) == []


def test_open_mappings_take_any_key() -> None:
    given = ("hydra.launcher.runtime_env.env_vars.WORD=a", "hydra.launcher.resources={tpu: 1}")
    found = settings(*given)
    assert found["runtime_env"] == {"env_vars": {"WORD": "a"}}
    assert found["resources"] == {"tpu": 1}
    assert launchers.opened("hydra.launcher.num_cpus", "1") is None
    assert launchers.opened("hydra.sweeper.params", "1") is None


def test_everything_that_is_wrong_is_named() -> None:
    wrong = {"address": "ray://head:1", "num_cpus": -1, "num_gpus": "many", "resources": 3}
    values = [one.value for one in launchers.problems_of({**launchers.DEFAULTS, **wrong})]
    names = ("address=ray://head:1", "num_cpus=-1", "num_gpus=many", "resources=3")
    assert values == [f"hydra.launcher.{name}" for name in names]


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    keys = ("seed", "hydra.launcher.num_cpu", "hydra.launcher.runtime_env.pip", "hydra/launcher")
    (found,) = launchers.unknown_keys(keys)
    assert found.value == "hydra.launcher.num_cpu"
    assert "num_cpus" in found.remedy


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match=r"pip install 'accel-runner\[ray\]'"):
        launchers.require()
