"""C3, C1: the launcher and the sweeper of a command line, and the runner's own ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel.machine import imports
from accel.machine.errors import ConfigError
from runner import cli
from runner.exit_codes import REFUSED
from runner.recipe import composition, hydra_setup
from runner.recipe.plugins import OWN, RayConf, SearchConf, is_own
from runner.sweep import plan
from tests.helpers import write_file

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
    found = plan.read(overrides, "config")
    assert (found.launcher, found.sweeper) == (launcher, sweeper)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("hydra.launcher.n_jobz=2", "Did you mean 'n_jobs'?"),
        ("hydra.sweeper.max_batch_sizes=2", "Did you mean 'max_batch_size'?"),
        ("hydra/launcher=ray hydra.launcher.num_cpu=1", "Did you mean 'num_cpus'?"),
        ("hydra/sweeper=optuna hydra.sweeper.n_trial=3", "Did you mean 'n_trials'?"),
        ("hydra/sweeper=optuna hydra.sweeper.n_trials=many", "Correct the value."),
        ("hydra/sweeper=optuna hydra.sweeper.params=optimizer", "Correct the value."),
        ("hydra/launcher=ray hydra.launcher.num_gpus=many", "Correct the value."),
        ("hydra/launcher=ray hydra.launcher.resources=3", "Correct the value."),
    ],
)
def test_a_wrong_key_or_type_of_a_plugin_is_named(override: str, remedy: str) -> None:
    """R10: before there is a folder of the sweep."""
    with pytest.raises(ConfigError) as refused:
        plan.read(["hydra/launcher=joblib", *override.split(), "seed=1,2"], "config")
    (problem,) = refused.value.problems
    assert (problem.value, problem.remedy) == (override.split()[-1], remedy)


def settings(kind: str, *overrides: str) -> dict[str, Any]:
    with hydra_setup.session():
        found: dict[str, Any] = plan.read(overrides, "config").nodes[f"hydra.{kind}"]
    return found


def test_hydra_knows_the_keys_of_the_launcher() -> None:
    given = ("hydra.launcher.num_cpus=0.5", "hydra.launcher.address=head:6379")
    found = settings("launcher", "hydra/launcher=ray", *given)
    assert RayConf(**found) == RayConf(num_cpus=0.5, address="head:6379")


def test_open_mappings_of_a_launcher_take_any_key() -> None:
    given = ("hydra.launcher.runtime_env.env_vars.WORD=a", "hydra.launcher.resources={tpu: 1}")
    found = settings("launcher", "hydra/launcher=ray", *given)
    assert found["runtime_env"] == {"env_vars": {"WORD": "a"}}
    assert found["resources"] == {"tpu": 1}


@pytest.mark.parametrize("name", OWN)
def test_hydra_knows_the_keys_of_the_sweepers(name: str) -> None:
    found = settings("sweeper", f"hydra/sweeper={name}", "hydra.sweeper.n_trials=3", "seed=1,2")
    assert is_own(found)
    sampler = {"name": {"optuna": "tpe", "random": "random"}[name]}
    assert SearchConf(**found) == SearchConf(sampler=sampler, n_trials=3)


WRONG: list[tuple[type, dict[str, object], str]] = [
    (RayConf, {"address": "ray://head:1"}, "hydra.launcher.address=ray://head:1"),
    (RayConf, {"num_cpus": -1}, "hydra.launcher.num_cpus=-1: it is at least 0"),
    (SearchConf, {"n_trials": 0}, "hydra.sweeper.n_trials=0: it is at least 1"),
    (SearchConf, {"seed": -1}, "it is at least 0"),
    (SearchConf, {"timeout": "an hour"}, "hydra.sweeper.timeout="),
    (SearchConf, {"direction": "minimise"}, "Did you mean 'minimize'"),
    (SearchConf, {"direction": ["minimize", "maximize"]}, "each objective .best. has a direction"),
    (SearchConf, {"metrics": ["validation/loss", "seconds"]}, "has a direction"),
    (SearchConf, {"metrics": "secods", "direction": "minimize"}, "Did you mean 'seconds'"),
    (SearchConf, {"metrics": "loss", "direction": "minimize"}, "validation/loss, test/loss"),
    (SearchConf, {"metrics": "seconds", "direction": "minimize", "pruner": "median"}, "are pruned"),
]


@pytest.mark.parametrize(("kind", "values", "message"), WRONG)
def test_a_wrong_value_is_refused(kind: type, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        SearchConf(n_trials=0, seed=-1, direction="up")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("line", "extra"), [("hydra/launcher=ray seed=1,2", "ray"), ("hydra/sweeper=random", "optuna")]
)
def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    line: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imports, "is_available", lambda name: name != extra)
    assert cli.main(["-m", *line.split()]) == REFUSED
    assert f"pip install 'accel-runner[{extra}]'" in capsys.readouterr().err


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
    write_file(tmp_path / "conf/experiment/mine.yaml", RANGES.format(defaults=defaults))
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = composition.new_run(["experiment=mine"], "config")
        if allowed:
            given = plan.read(["experiment=mine"], "config").nodes["hydra.sweeper"]
            assert given["params"] == {"optimizer.lr": "interval(0, 1)"}
    assert (found.problems == []) == allowed
    if not allowed:
        assert "- override /hydra/sweeper: optuna" in found.problems[0].remedy
