"""C2, C3: each override takes effect or is refused, in the order that Hydra gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.recipe import composition, factory, hydra_setup
from runner.recipe.schema import Recipe
from runner.runs import directory
from runner.runs.job import Job
from tests.helpers import write_file

pytestmark = pytest.mark.usefixtures("hydra_session")


ENGINES = ("fsdp", "deepspeed", "tensor_parallel")


@pytest.mark.parametrize(
    ("overrides", "engines"),
    [
        (["distributed=ddp"], {}),
        (["distributed=fsdp"], {"fsdp": "full_shard"}),
        (["distributed=deepspeed"], {"deepspeed": "zero2"}),
        (["distributed=fsdp", "fsdp=shard_grad_op"], {"fsdp": "shard_grad_op"}),
        (["deepspeed=zero3", "distributed=deepspeed"], {"deepspeed": "zero3"}),
        (
            ["distributed=fsdp", "tensor_parallel=default"],
            {"fsdp": "full_shard", "tensor_parallel": "default"},
        ),
    ],
)
def test_a_preset_is_processes_and_an_engine(overrides: list[str], engines: dict[str, str]) -> None:
    found = composition.require(composition.new_run(overrides, "config"))
    assert (found.distributed.kind, found.distributed.device) == ("auto", "auto")
    assert {name for name in ENGINES if getattr(found, name) is not None} == set(engines)
    chosen = [f"{group}={file}" for group, file in engines.items()]
    alone = composition.require(composition.new_run(chosen, "config"))
    for name in engines:
        assert getattr(found, name) == getattr(alone, name)


@pytest.mark.parametrize(
    "overrides",
    [["distributed=fsdp", "deepspeed=zero1"], ["distributed=deepspeed", "fsdp=full_shard"]],
)
def test_a_preset_with_a_second_engine_is_refused(overrides: list[str]) -> None:
    (problem,) = composition.new_run(overrides, "config").problems
    assert "fsdp" in problem.value
    assert "deepspeed" in problem.value


def test_a_group_is_switched_off_by_null() -> None:
    overrides = ["scheduler=null", "callbacks=null", "profile=null"]
    found = composition.require(composition.new_run(overrides, "config"))
    assert (found.scheduler, found.callbacks, found.profile) == (None, {}, None)


def test_several_files_of_callbacks_are_joined() -> None:
    found = composition.require(composition.new_run(["callbacks=[early_stopping,text]"], "config"))
    assert list(found.callbacks) == ["early_stopping", "text_sample"]


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (["experiment=bytes_gpt", "+model.dropout=0.5"], {"dropout": 0.5}),
        (["model.own=3", "++model.dropout=0.5"], {"own": 3, "dropout": 0.5}),
        (["~model.dropout", "model.dropout=0.5"], {"dropout": 0.5}),
    ],
)
def test_arguments_of_factories_may_have_a_plus_and_be_taken_out(
    overrides: list[str], model: dict[str, Any]
) -> None:
    """Hydra composes with the file's arguments although another factory does not get them."""
    found = composition.new_run([*overrides, "model.name=byte_gpt"], "config")
    assert found.problems == []
    assert {**found.recipe.model, **model} == found.recipe.model
    assert ("own" in found.recipe.model) is ("own" in model)


def recorded_in(run_dir: Path, own: tuple[str, ...], recipe: Recipe) -> composition.Frozen:
    """Record a recipe as a run does; return what a resume reads."""
    run_dir.mkdir()
    Job(run_dir, overrides=own, cwd=str(run_dir.parent)).save(recipe)
    return directory.frozen(run_dir)


def test_arguments_are_taken_out_of_a_resumed_run(tmp_path: Path) -> None:
    """Also what no file has, but its own command line, and where its files are gone."""
    own = ("model.own=3", "data.own=3")
    frozen = composition.require(composition.new_run(own, "config"))
    for files in (own, (*own, "experiment=gone")):
        run = recorded_in(tmp_path / str(len(files)), files, frozen)
        found = composition.require(composition.resumed(run, ["~model.own", "~model.width"]))
        recorded = factory.completed(frozen)
        kept = {k: value for k, value in recorded.model.items() if k not in ("own", "width")}
        assert found.model == kept
        assert found.data == recorded.data


@pytest.fixture
def others(tmp_path: Path) -> str:
    """A folder of recipes that a command line adds; returned as the override that does so."""
    text = "# @package _global_\ndefaults:\n  - override /model: cnn\nmodel:\n  own: 3\n"
    write_file(tmp_path / "experiment" / "slow.yaml", text)
    return f"hydra.searchpath=['file://{tmp_path}']"


def test_a_mistake_beside_files_of_another_folder_is_told_alone(others: str) -> None:
    given = ["experiment=slow", "model.own=4", "optimzer.lr=1", others]
    with hydra_setup.session(given):
        found = composition.new_run(given, "config")
    (problem,) = found.problems
    assert problem.value == "optimzer.lr=1"
    assert "optimizer.lr" in problem.remedy
    given = ["experiment=slo", others]
    with hydra_setup.session(given):
        (problem,) = composition.new_run(given, "config").problems
    assert "Did you mean 'slow'?" in problem.remedy


@pytest.mark.parametrize("change", ["optimzer.lr=1", "optimizer.lr=1"])
def test_a_run_is_composed_from_the_folders_it_had(
    others: str, change: str, tmp_path: Path
) -> None:
    own = ("experiment=slow", "model.own=4", others)
    with hydra_setup.session(own):
        frozen = composition.require(composition.new_run(own, "config"))
    found = composition.again(recorded_in(tmp_path / "run", own, frozen), [change])
    assert [problem.value for problem in found.problems] == ([change] if "mz" in change else [])
    assert found.recipe.model == factory.completed(frozen).model


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (["model.name=byte_gpt"], {"name": "byte_gpt"}),
        (["model.name=byte_gpt", "model.width=7"], {"name": "byte_gpt", "width": 7}),
        (["model._target_=torch.nn.Linear"], {"_target_": "torch.nn.Linear"}),
        (["experiment=bytes_gpt", "model.name=cnn"], {"name": "cnn"}),
    ],
)
def test_another_factory_does_not_get_the_arguments_of_a_file(
    overrides: list[str], model: dict[str, Any]
) -> None:
    assert composition.new_run(overrides, "config").recipe.model == model


STEPS = "torch.optim.lr_scheduler.StepLR"


@pytest.mark.parametrize(
    ("overrides", "scheduler"),
    [
        (["scheduler={name: linear, warmup: 3}"], {"name": "linear", "warmup": 3}),
        (
            ["scheduler={name: linear, warmup: 3}", "scheduler.warmup=5"],
            {"name": "linear", "warmup": 5},
        ),
        (["scheduler={warmup: 3}"], {"name": "cosine", "warmup": 3, "final": 0.0}),
        (
            ["scheduler={name: linear, warmup: 3}", "experiment=bytes_gpt"],
            {"name": "linear", "warmup": 3},
        ),
        ([f"++scheduler={{_target_: {STEPS}, step_size: 3}}"], {"_target_": STEPS, "step_size": 3}),
    ],
)
def test_a_mapping_takes_effect(overrides: list[str], scheduler: dict[str, Any]) -> None:
    found = composition.require(composition.new_run(overrides, "config"))
    assert found.scheduler == scheduler


@pytest.mark.parametrize("node", ["model", "callbacks.early_stopping"])
def test_a_mapping_of_another_factory_replaces_the_node(node: str) -> None:
    overrides = ["callbacks=[early_stopping]", f"{node}={{name: other, depth: 2}}"]
    found: Any = composition.new_run(overrides, "config").recipe
    for part in node.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == {"name": "other", "depth": 2}


@pytest.mark.parametrize("own", [(), ("scheduler={name: constant}",)])
def test_a_mapping_takes_effect_on_resume(own: tuple[str, ...], tmp_path: Path) -> None:
    frozen = composition.require(composition.new_run(own, "config"))
    run = recorded_in(tmp_path / "run", own, frozen)
    found = composition.require(composition.resumed(run, ["scheduler={name: linear, warmup: 3}"]))
    assert found.scheduler == {"name": "linear", "warmup": 3}


def test_a_mandatory_value_of_a_file_comes_from_the_command_line(tmp_path: Path) -> None:
    write_file(tmp_path / "model" / "own_m.yaml", "name: cnn\nwidth: ???\n")
    given = ["model=own_m", f"hydra.searchpath=['file://{tmp_path}']"]
    with hydra_setup.session(given):
        found = composition.new_run([*given, "model.width=4"], "config")
        (problem,) = composition.new_run(given, "config").problems
    assert composition.require(found).model == {"name": "cnn", "width": 4}
    assert problem.value.endswith("model/own_m.yaml: model.width")


@pytest.fixture
def inline(tmp_path: Path) -> str:
    """An experiment that gives nodes without a defaults list; returned as with `others`."""
    nodes = "optimizer: {name: sgd_own, lr: 1}\nscheduler: {name: linear}\ncallbacks: {a: {b: 1}}\n"
    write_file(tmp_path / "experiment" / "own.yaml", f"# @package _global_\n{nodes}")
    return f"hydra.searchpath=['file://{tmp_path}']"


def test_an_experiment_names_a_factory_inline(inline: str) -> None:
    """It gets none of the arguments of the group's file; another file is refused."""
    given = ["experiment=own", inline]
    with hydra_setup.session(given):
        found = composition.require(composition.new_run(given, "config"))
        assert found.optimizer == {"name": "sgd_own", "lr": 1}
        (problem,) = composition.new_run([*given, "optimizer=sgd"], "config").problems
        assert problem.value == "optimizer=sgd"
        words = [*given, "optimizer={name: sgd}"]
        assert composition.new_run(words, "config").recipe.optimizer == {"name": "sgd"}


def test_a_group_that_is_left_out_is_out_under_an_experiment_too(inline: str) -> None:
    for words in (["scheduler=null", "callbacks={}"], ["~scheduler", "callbacks=[]"]):
        given = ["experiment=own", *words, inline]
        with hydra_setup.session(given):
            found = composition.new_run(given, "config").recipe
        assert (found.scheduler, found.callbacks) == (None, {})
        assert found.optimizer["name"] == "sgd_own"


def test_hydras_own_interpolations_know_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# @package _global_\ntags: ['${hydra:job.override_dirname}']\n"
    write_file(tmp_path / "conf" / "experiment" / "own.yaml", text)
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = composition.new_run(["experiment=own", "seed=3"], "config")
    assert composition.require(found).tags == ["experiment=own,seed=3"]


def test_interpolations_are_resolved() -> None:
    overrides = ["tracker.project_name=${name}", "tags=['${hydra:job.num}']"]
    found = composition.require(composition.new_run(overrides, "config", number=3))
    assert (found.tracker.project_name, found.tags) == ("digits", ["3"])
