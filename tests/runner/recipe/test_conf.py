"""Every file of `conf/` composes, and every field of every documented handler is reachable (C3)."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from accel.config import fp8, handlers, training
from accel.machine.enums import DDPCommunicationHookType, DynamoBackend
from runner.recipe import composition, keys, paths, serialization
from runner.recipe.factory import check_factories
from runner.recipe.schema import DataLoader, Recipe

CONF = paths.conf_folder()
# A step that builds its own models leaves these null.
ALONE = {
    "step=gan": ["model=null", "objective=null", "optimizer=null", "scheduler=null"],
    "deepspeed=config_file": ["deepspeed.hf_ds_config=ds.json"],
}


pytestmark = pytest.mark.usefixtures("hydra_session")


def choices() -> list[str]:
    files = sorted(CONF.glob("*/*.yaml"))
    return [f"{path.parent.name}={path.stem}" for path in files]


@pytest.mark.parametrize("choice", ["config", *choices()])
def test_every_file_composes_into_a_recipe(choice: str) -> None:
    overrides = [] if choice == "config" else [choice, *ALONE.get(choice, [])]
    examined = composition.new_run(overrides, "config")
    assert examined.problems == []
    assert check_factories(examined.recipe) == []


def test_a_composed_recipe_is_plain_and_back() -> None:
    from runner.recipe.serialization import from_plain, to_plain

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


# -- every field of every handler ----------------------------------------------------------


def wanted(module: Any, name: str) -> bool:
    """A filter of layers, by its dotted name."""
    return True


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
    "precision.fp8_torchao": (
        fp8.AORecipeKwargs,
        {
            "config": ("rowwise", "rowwise"),
            "module_filter_func": (f"{__name__}.wanted", wanted),
            "pad_inner_dim": ("false", False),
            "enable_fsdp_float8_all_gather": ("false", False),
        },
    ),
    "precision.fp8_te": (
        fp8.TERecipeKwargs,
        {
            "use_autocast_during_eval": ("true", True),
            "margin": ("1", 1),
            "interval": ("2", 2),
            "fp8_format": ("E4M3", "E4M3"),
            "amax_history_len": ("16", 16),
            "amax_compute_algo": ("max", "max"),
            "override_linear_precision": ("[true,false,true]", (True, False, True)),
            "use_mxfp8_block_scaling": ("true", True),
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


@pytest.mark.parametrize(
    ("recipe", "other"), [("fp8_te", "fp8_torchao"), ("fp8_torchao", "fp8_te")]
)
def test_every_field_of_every_handler_is_set_by_override(
    monkeypatch: pytest.MonkeyPatch, recipe: str, other: str
) -> None:
    monkeypatch.setenv("RUNNER_IMPORTS", __name__.partition(".")[0])
    handlers = {node: found for node, found in HANDLERS.items() if node != f"precision.{other}"}
    overrides = [f"precision={recipe}", "profile=trace", "compile=default"]
    for node, (_, fields) in handlers.items():
        overrides += [f"{node}.{name}={text}" for name, (text, _) in fields.items()]
    examined = composition.new_run(overrides, "config")
    assert examined.problems == []
    for node, (kind, fields) in handlers.items():
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
