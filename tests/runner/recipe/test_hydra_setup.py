"""C3: overrides as a person writes them, and as Hydra wants them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.recipe import composition, hydra_setup

pytestmark = pytest.mark.usefixtures("hydra_session")


def test_new_overrides_replace_older_ones_of_their_node() -> None:
    own = ["seed=1", "model.width=3", "model=cnn", "trainer.epochs=2"]
    assert hydra_setup.merge(own, ["seed=2"]) == [*own[1:], "seed=2"]
    assert hydra_setup.merge(own, ["model=gpt"]) == ["seed=1", "trainer.epochs=2", "model=gpt"]
    taken_out = hydra_setup.merge(own, ["~model.width"])
    assert taken_out == [*own, "~model.width"]


@pytest.mark.parametrize(
    ("override", "opened"),
    [
        ("seed=1", "seed=1"),
        ("model.width=3", "++model.width=3"),
        ("+model.width=3", "++model.width=3"),
        ("scheduler=null", "~scheduler"),
        ("callbacks=null", "callbacks=[]"),
        ("~model.width", "~model.width"),
    ],
)
def test_open_mappings_take_keys_with_and_without_a_plus(override: str, opened: str) -> None:
    assert hydra_setup.opened([override]) == [opened]


def test_what_was_opened_is_shown_as_it_was_written() -> None:
    written = ["model.width=3", "scheduler=null", "callbacks=null", "seed=1"]
    assert [hydra_setup.closed(one) for one in hydra_setup.opened(written)] == written


def test_a_sweep_is_the_product_of_its_values() -> None:
    assert hydra_setup.expand(["seed=1,2", "name=x", "precision=no,bf16"]) == [
        ["seed=1", "name=x", "precision=no"],
        ["seed=1", "name=x", "precision=bf16"],
        ["seed=2", "name=x", "precision=no"],
        ["seed=2", "name=x", "precision=bf16"],
    ]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("optimizer.lr=interval(0,1)", "goes through lists of values"),
        ("scheduler=cosine,null", "goes through the files of a group"),
    ],
)
def test_sweeps_without_a_list_of_values_are_refused(override: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        hydra_setup.expand([override])


def test_each_value_of_a_sweep_is_in_a_probe() -> None:
    assert hydra_setup.probes(["seed=1,2,3", "optimizer.lr=interval(0.5,1)"]) == [
        ["seed=1", "optimizer.lr=0.5"],
        ["seed=2", "optimizer.lr=0.5"],
        ["seed=3", "optimizer.lr=0.5"],
    ]


def test_the_runners_own_part_of_hydra_is_closed() -> None:
    assert hydra_setup.hydra_problems(["hydra/launcher=joblib", "seed=1"]) == []
    (problem,) = hydra_setup.hydra_problems(["hydra.run.dir=/tmp"])
    assert problem.value == "hydra.run.dir=/tmp"


@pytest.mark.parametrize(
    ("overrides", "log_with"),
    [
        (["tracker=[tensorboard,mlflow]"], ["tensorboard", "mlflow"]),
        (["tracker=[mlflow,csv,csv]"], ["mlflow", "csv"]),
        (["tracker=[tensorboard,csv]", "tracker.log_with=[csv]"], ["csv"]),
        (["experiment=tracked"], ["tensorboard", "csv"]),
        (["experiment=tracked", "tracker=mlflow"], ["mlflow"]),
        (["experiment=own"], ["wandb"]),
    ],
)
def test_several_files_of_the_tracker_are_all_used(
    overrides: list[str],
    log_with: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    lines = "# @package _global_\ndefaults:\n  - override /tracker: [tensorboard, csv]\n"
    (folder / "tracked.yaml").write_text(lines)
    (folder / "own.yaml").write_text(f"{lines}  - _self_\ntracker:\n  log_with: [wandb]\n")
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
    assert hydra_setup.hydra_problems(overrides) == []
