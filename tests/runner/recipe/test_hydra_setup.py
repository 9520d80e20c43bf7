"""C3: overrides as a person writes them, and as Hydra wants them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.errors import HydraException

from accel.machine.errors import ConfigError
from runner.recipe import composition, diagnose, hydra_setup
from tests.helpers import write_file

pytestmark = pytest.mark.usefixtures("hydra_session")


def test_new_overrides_replace_older_ones_of_their_node() -> None:
    own = ["seed=1", "model.width=3", "model=cnn", "trainer.epochs=2"]
    assert hydra_setup.merge(own, ["seed=2"]) == [*own[1:], "seed=2"]
    assert hydra_setup.merge(own, ["model=gpt"]) == ["seed=1", "trainer.epochs=2", "model=gpt"]


def test_hydra_itself_composes_what_a_person_writes() -> None:
    """Arguments of factories need no plus; a typo elsewhere is refused."""
    written = ["model.depth=3", "scheduler=null", "fsdp=full_shard", "fsdp._target_=x", "seed=1"]
    found = hydra_setup.composed_with_hydra(written, "config")
    assert (found.model.depth, found.fsdp._target_, found.seed) == (3, "x", 1)
    assert found.scheduler == {}
    with pytest.raises(HydraException):
        hydra_setup.composed_with_hydra(["optimzer.lr=1"], "config")


def test_a_sweep_is_the_product_of_its_values() -> None:
    assert hydra_setup.expand(["seed=1,2", "name=x", "precision=no,bf16"]) == [
        ["seed=1", "name=x", "precision=no"],
        ["seed=1", "name=x", "precision=bf16"],
        ["seed=2", "name=x", "precision=no"],
        ["seed=2", "name=x", "precision=bf16"],
    ]


def test_sweeps_without_a_list_of_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="goes through lists of values"):
        hydra_setup.expand(["optimizer.lr=interval(0,1)"])


def test_values_behind_a_space_are_written_with_an_equals_sign() -> None:
    words = ["seed", "3", "name=x", "trainer.epochs", "=", "5", "seed=", "epochs"]
    told = [(one.value, one.remedy) for one in diagnose.unreadable(words)]
    assert ("seed", "Write seed=3") in told
    assert ("trainer.epochs", "Write trainer.epochs=5") in told
    assert ("epochs", "Write trainer.epochs=…") in told
    assert not {"name=x", "seed="} & {value for value, _ in told}


def test_each_value_of_a_sweep_is_in_a_probe() -> None:
    assert hydra_setup.probes(["seed=1,2,3", "optimizer.lr=interval(0.5,1)"]) == [
        ["seed=1", "optimizer.lr=0.5"],
        ["seed=2", "optimizer.lr=0.5"],
        ["seed=3", "optimizer.lr=0.5"],
    ]


@pytest.mark.parametrize(
    ("overrides", "log_with"),
    [
        (["tracker=[mlflow,csv,csv]"], ["mlflow", "csv"]),
        (["tracker=[tensorboard,csv]", "tracker.log_with=[csv]"], ["csv"]),
        (["experiment=tracked", "tracker=mlflow"], ["mlflow"]),
        (["experiment=own"], ["wandb"]),
    ],
)
def test_several_files_of_the_tracker_are_all_used(
    overrides: list[str], log_with: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "experiment"
    lines = "# @package _global_\ndefaults:\n  - override /tracker: [tensorboard, csv]\n"
    write_file(folder / "tracked.yaml", lines)
    write_file(folder / "own.yaml", f"{lines}  - _self_\ntracker:\n  log_with: [wandb]\n")
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = composition.new_run(overrides, "config").recipe
    assert found.tracker.log_with == log_with
    if "mlflow" in log_with:
        assert found.tracker.init_kwargs["mlflow"]["logging_dir"] == "runs/mlflow"


@pytest.mark.parametrize(
    ("overrides", "levels"),
    [
        ([], {}),
        (["hydra.verbose=true"], {"": "DEBUG"}),
        (["hydra.verbose=accel"], {"accel": "DEBUG"}),
        (["hydra.verbose=[accel,runner.training]"], {"accel": "DEBUG", "runner.training": "DEBUG"}),
    ],
)
def test_levels_of_loggers(overrides: list[str], levels: dict[str, str]) -> None:
    assert hydra_setup.log_levels(overrides) == levels
    assert hydra_setup.hydra_problems([*overrides, "hydra/launcher=joblib"]) == []
