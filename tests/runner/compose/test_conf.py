"""Every file of `conf/` composes, and every field of every documented handler is reachable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from accel.config import fp8, handlers, training
from accel.enums import DDPCommunicationHookType, DynamoBackend
from runner.build import parts
from runner.compose import composition, hydra_setup
from runner.config import keys, paths, serialization
from runner.config.schema import DataLoader, Recipe
from runner.run_dir.job import Job

CONF = paths.conf_folder()
NOT_YET = "this version does not offer it yet"
NOT_BUILT = {"precision=fp8"}
# A step that builds its own models leaves these null.
ALONE = {
    "step=gan": ["model=null", "objective=null", "optimizer=null", "scheduler=null"],
    "deepspeed=config_file": ["deepspeed.hf_ds_config=ds.json"],
}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with hydra_setup.session():
        yield


def choices() -> list[str]:
    files = sorted(CONF.glob("*/*.yaml"))
    return [f"{path.parent.name}={path.stem}" for path in files]


def switch_off(choice: str) -> bool:
    return choice in NOT_BUILT or choice.partition("=")[0] in NOT_BUILT


@pytest.mark.parametrize("choice", ["config", *choices()])
def test_every_file_composes_into_a_recipe(choice: str) -> None:
    overrides = [] if choice == "config" else [choice, *ALONE.get(choice, [])]
    examined = composition.new_run(overrides, "config")
    assert all(problem.rule == NOT_YET for problem in examined.problems), examined.problems
    assert bool(examined.problems) == switch_off(choice)
    assert parts.check_factories(examined.recipe) == []


def test_a_composed_recipe_is_plain_and_back() -> None:
    from runner.config.serialization import from_plain, to_plain

    found = composition.require(composition.new_run(["precision=bf16", "profile=trace"], "config"))
    assert from_plain(to_plain(found)) == found


def test_the_default_recipe() -> None:
    found = composition.require(composition.new_run([], "config"))
    assert found.name == "digits"
    assert (found.model["name"], found.data["name"]) == ("cnn", "digits")
    assert (found.distributed.kind, found.precision.mode) == ("none", "no")
    assert (found.fsdp, found.deepspeed, found.tensor_parallel) == (None,) * 3
    assert (found.compile, found.profile) == (None, None)


def test_defaults_live_in_the_schema_alone() -> None:
    """A group's default file changes nothing silently: what it sets is a key of the schema."""
    found = composition.require(composition.new_run([], "config"))
    assert found.precision == Recipe().precision
    assert found.distributed == Recipe().distributed


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
    assert list(found.callbacks) == ["early_stopping", "text_baselines", "text_sample"]


def test_arguments_of_factories_need_no_plus() -> None:
    overrides = ["model.width=8", "distributed.ddp.comm_state_option.matrix_approximation_rank=2"]
    found = composition.require(composition.new_run(overrides, "config"))
    assert found.model["width"] == 8
    assert found.distributed.ddp.comm_state_option == {"matrix_approximation_rank": 2}


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (["experiment=bytes_gpt", "+model.dropout=0.5"], {"dropout": 0.5}),
        (["+model.dropout=0.5"], {"dropout": 0.5}),
        (["++model.dropout=0.5"], {"dropout": 0.5}),
        (["model.own=3", "+model.dropout=0.5"], {"own": 3, "dropout": 0.5}),
        (["+model.own=3", "~model.own"], {}),
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


def test_arguments_are_taken_out_of_a_resumed_run(tmp_path: Path) -> None:
    """Also what no file has, but its own command line, and where its files are gone."""
    own = ("model.own=3", "data.own=3")
    frozen = composition.require(composition.new_run(own, "config"))
    for files in (own, (*own, "experiment=gone")):
        job = Job(tmp_path / str(len(files)), overrides=files, cwd=str(tmp_path))
        job.run_dir.mkdir()
        job.save(frozen)
        found = composition.require(
            composition.resumed(job.run_dir, ["~model.own", "~model.width"])
        )
        width = {
            name: value for name, value in frozen.model.items() if name not in ("own", "width")
        }
        assert found.model == width
        assert found.data == frozen.data


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (["model.name=byte_gpt"], {"name": "byte_gpt"}),
        (["model.name=byte_gpt", "model.width=7"], {"name": "byte_gpt", "width": 7}),
        (["model._target_=torch.nn.Linear"], {"_target_": "torch.nn.Linear"}),
        (["model=cnn", "model.name=byte_gpt"], {"name": "byte_gpt"}),
        (["experiment=bytes_gpt", "model.name=cnn"], {"name": "cnn"}),
    ],
)
def test_another_factory_does_not_get_the_arguments_of_a_file(
    overrides: list[str], model: dict[str, Any]
) -> None:
    assert composition.new_run(overrides, "config").recipe.model == model


def test_the_files_own_factory_keeps_its_arguments() -> None:
    file = composition.new_run([], "config").recipe.model
    found = composition.new_run(["model.name=cnn", "model.width=7"], "config").recipe.model
    assert found == {**file, "width": 7}


def test_interpolations_are_resolved() -> None:
    overrides = ["tracker.project_name=${name}", "tags=['${hydra:job.num}']"]
    found = composition.require(composition.new_run(overrides, "config", number=3))
    assert (found.tracker.project_name, found.tags) == ("digits", ["3"])


# -- every field of every handler ----------------------------------------------------------


def traced(profiler: Any) -> None:
    """Stand for a user's function that a recipe names."""


HANDLERS: dict[str, tuple[type, dict[str, tuple[str, Any]]]] = {
    "distributed.ddp": (
        handlers.DistributedDataParallelKwargs,
        {
            "dim": ("1", 1),
            "broadcast_buffers": ("false", False),
            "bucket_cap_mb": ("7", 7),
            "find_unused_parameters": ("true", True),
            "check_reduction": ("true", True),
            "gradient_as_bucket_view": ("true", True),
            "static_graph": ("true", True),
            "comm_hook": ("power_sgd", DDPCommunicationHookType.POWER_SGD),
            "comm_wrapper": ("bf16", DDPCommunicationHookType.BF16),
            "comm_state_option": ("{start_powerSGD_iter: 5}", {"start_powerSGD_iter": 5}),
        },
    ),
    "distributed.init": (
        handlers.InitProcessGroupKwargs,
        {
            "backend": ("gloo", "gloo"),
            "init_method": ("'tcp://127.0.0.1:29500'", "tcp://127.0.0.1:29500"),
            "timeout": ("600", timedelta(minutes=10)),
        },
    ),
    "precision.autocast": (
        handlers.AutocastKwargs,
        {"enabled": ("false", False), "cache_enabled": ("false", False)},
    ),
    "precision.scaler": (
        handlers.GradScalerKwargs,
        {
            "init_scale": ("1024", 1024.0),
            "growth_factor": ("3", 3.0),
            "backoff_factor": ("0.25", 0.25),
            "growth_interval": ("10", 10),
            "enabled": ("false", False),
        },
    ),
    "precision.fp8": (
        fp8.FP8RecipeKwargs,
        {
            "backend": ("TE", "TE"),
            "use_autocast_during_eval": ("true", True),
            "opt_level": ("O1", "O1"),
            "margin": ("1", 1),
            "interval": ("2", 2),
            "fp8_format": ("E4M3", "E4M3"),
            "amax_history_len": ("16", 16),
            "amax_compute_algo": ("max", "max"),
            "override_linear_precision": ("[true,false,true]", (True, False, True)),
        },
    ),
    "profile": (
        handlers.ProfileKwargs,
        {
            "activities": ("[cpu]", ["cpu"]),
            "schedule_option": (
                "{wait: 1, warmup: 1, active: 2, repeat: 3, skip_first: 4}",
                {"wait": 1, "warmup": 1, "active": 2, "repeat": 3, "skip_first": 4},
            ),
            "on_trace_ready": (f"{__name__}.traced", traced),
            "record_shapes": ("true", True),
            "profile_memory": ("true", True),
            "with_stack": ("true", True),
            "with_flops": ("true", True),
            "with_modules": ("true", True),
            "output_trace_dir": ("traces", "traces"),
        },
    ),
    "dataloader": (
        DataLoader,
        {
            "split_batches": ("true", True),
            "dispatch_batches": ("true", True),
            "even_batches": ("false", False),
            "use_seedable_sampler": ("false", False),
            "data_seed": ("3", 3),
            "non_blocking": ("true", True),
            "use_stateful_dataloader": ("true", True),
            "num_workers": ("2", 2),
            "pin_memory": ("true", True),
            "prefetch_factor": ("4", 4),
            "persistent_workers": ("true", True),
            "seed_samples": ("false", False),
        },
    ),
    "trainer.accumulation": (
        training.GradientAccumulationPlugin,
        {
            "num_steps": ("2", 2),
            "adjust_scheduler": ("false", False),
            "sync_with_dataloader": ("false", False),
            "sync_each_batch": ("true", True),
        },
    ),
    "checkpoint.project": (
        training.ProjectConfiguration,
        {
            "project_dir": ("elsewhere", "elsewhere"),
            "logging_dir": ("logs", "logs"),
            "automatic_checkpoint_naming": ("false", False),
            "total_limit": ("5", 5),
            "iteration": ("7", 7),
            "save_on_each_node": ("true", True),
        },
    ),
    "compile": (
        training.TorchDynamoPlugin,
        {
            "backend": ("eager", DynamoBackend.EAGER),
            "mode": ("default", "default"),
            "fullgraph": ("true", True),
            "dynamic": ("true", True),
            "options": ("{trace: true}", {"trace": True}),
            "disable": ("true", True),
            "use_regional_compilation": ("true", True),
        },
    ),
}


def test_the_table_names_every_handler_and_every_field() -> None:
    documented = {
        kind
        for module in (handlers, training)
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    }
    assert {base for kind, _ in HANDLERS.values() for base in kind.__mro__} >= documented
    for node, (kind, fields) in HANDLERS.items():
        assert set(fields) == {field.name for field in dataclasses.fields(kind)}, node


def node_at(recipe: Recipe, key: str) -> Any:
    node: Any = recipe
    for part in key.split("."):
        node = getattr(node, part)
    return node


def test_every_field_of_every_handler_is_set_by_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_IMPORTS", __name__.partition(".")[0])
    overrides = ["precision=fp8", "profile=trace", "compile=default"]
    for node, (_, fields) in HANDLERS.items():
        overrides += [f"{node}.{name}={text}" for name, (text, _) in fields.items()]
    examined = composition.new_run(overrides, "config")
    assert {problem.rule for problem in examined.problems} == {NOT_YET}
    for node, (kind, fields) in HANDLERS.items():
        built, default = node_at(examined.recipe, node), node_at(Recipe(), node) or kind()
        assert type(built) is kind, node
        for name, (_, expected) in fields.items():
            assert getattr(built, name) == expected, f"{node}.{name}"
            assert getattr(default, name) != expected, f"{node}.{name} is its default"


def test_every_key_of_the_schema_is_a_key_of_the_composed_recipe() -> None:
    found = composition.require(composition.new_run([], "config"))
    plain = serialization.to_plain(found)
    missing = []
    for key in keys.typed_keys():
        node: Any = plain
        for part in key.split("."):
            if node is None:
                break
            if part not in node:
                missing.append(key)
                break
            node = node[part]
    assert missing == []


# -- the project's own files ---------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


EXPERIMENT = "# @package _global_\ndefaults:\n  - override /model: tiny\n  - _self_\n\nname: mine\n"


def test_a_projects_own_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "conf/model/tiny.yaml", "name: cnn\nwidth: 2\n")
    write(tmp_path / "conf/experiment/mine.yaml", EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        found = composition.require(composition.new_run(["experiment=mine", "seed=3"], "config"))
    assert (found.name, found.model, found.seed) == ("mine", {"name": "cnn", "width": 2}, 3)


def test_a_file_that_is_shadowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "conf/model/cnn.yaml", "name: mine\n")
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        (problem,) = composition.new_run([], "config").problems
    assert str(tmp_path / "conf/model/cnn.yaml") in problem.value
    assert "same name and is read instead" in problem.rule


def test_the_same_file_again_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "conf/model/cnn.yaml", (CONF / "model/cnn.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        assert composition.new_run([], "config").problems == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("callbacks: {x: {_target_: os.system}}", "hydra.callbacks"),
        ("job: {env_set: {LD_PRELOAD: x}}", "hydra.job.env_set"),
        ("job_logging: {root: {handlers: [x]}, handlers: {x: {(): os.system}}}", "job_logging"),
        ("sweeper: {params: {seed: '1,2'}}", "hydra.sweeper.params"),
        ("mode: MULTIRUN", "hydra.mode"),
    ],
)
def test_a_file_cannot_reach_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, where: str
) -> None:
    write(tmp_path / "conf/mine.yaml", f"defaults: [config, _self_]\nhydra: {{{text}}}\n")
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        (problem,) = composition.new_run([], "mine").problems
    assert where in problem.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer: {epochz: 3}", ("trainer.epochz", "Did you mean 'trainer.epochs'?")),
        ("trainer: {epochs: many}", ("trainer.epochs", "a whole number")),
        ("trainer: {epochs: -3}", ("trainer.epochs=-3", "at least 1")),
        ("defaults: [{override /model: cnm}]", ("model: cnm", "Did you mean 'cnn'?")),
        ("trainer: {epochs: [}", ("no YAML",)),
        ("optimzer: {lr: 1}", ("optimzer", "Did you mean 'optimizer")),
    ],
)
def test_a_mistake_in_a_file_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, ...]
) -> None:
    write(tmp_path / "conf/experiment/wrong.yaml", f"# @package _global_\n{text}\n")
    monkeypatch.chdir(tmp_path)
    with hydra_setup.session():
        (problem,) = composition.new_run(["experiment=wrong"], "config").problems
    for part in expected:
        assert part in str(problem)
