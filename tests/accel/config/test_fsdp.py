"""The FSDP plugin: older spellings, YAML, environment variables, and what it refuses (E1, E5)."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from accel.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.config.fsdp import get_module_class_from_name
from accel.machine.env import Environment, patched
from accel.machine.errors import ConfigError, Problems
from accel.plan.arguments import Arguments, choose
from accel.plan.plan import resolve
from accel.strategies.mesh.parallelize import build_formats
from accel.strategies.mesh.units import find_units


@pytest.mark.parametrize(
    ("strategy", "reshard", "replicas"),
    [
        ("FULL_SHARD", True, 1),
        ("shard_grad_op", False, 1),
        ("3", False, "all"),
        (4, True, "nodes"),
        (ShardingStrategy._HYBRID_SHARD_ZERO2, False, "nodes"),
        (ShardingStrategy.HYBRID_SHARD, True, "nodes"),
    ],
)
def test_strategies_of_the_older_wrapper(strategy: Any, reshard: bool, replicas: Any) -> None:
    with pytest.warns(FutureWarning, match="is now reshard_after_forward"):
        plugin = Plugin(sharding_strategy=strategy)
    assert (plugin.reshard_after_forward, plugin.dp_replicate_size) == (reshard, replicas)
    assert plugin.sharding_strategy is None


def test_older_arguments_are_translated_with_one_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin = Plugin(
            fsdp_version=1,
            sharding_strategy="FULL_SHARD",
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            use_orig_params=True,
            state_dict_type=StateDictType.FULL_STATE_DICT,
            state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            limit_all_gathers=True,
            sync_module_states=True,
            forward_prefetch=False,
        )
    assert len(caught) == 1
    text = str(caught[0].message)
    for word in ("fsdp_version=1", "reshard_after_forward=True", "BACKWARD_PRE", "use_orig_params"):
        assert word in text
    assert plugin.fsdp_version == 2
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(plugin) == plugin  # translated once


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sharding_strategy": "FUL_SHARD"}, "Did you mean 'FULL_SHARD'"),
        ({"backward_prefetch": "BACKWARD_POST"}, "always gathers the next unit"),
        ({"limit_all_gathers": False}, "bounds the all-gathers in flight"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "only in the older wrapper"),
        ({"state_dict_config": LocalStateDictConfig()}, "full or sharded state dicts are saved"),
        ({"fsdp_version": 3}, "FSDP 1 and 2"),
        ({"auto_wrap_policy": "size_based_wrap"}, "Give min_num_params"),
        ({"min_num_params": 0}, "at least 1"),
        ({"reshard_after_forward": 1}, "at least 2"),
        ({"dp_replicate_size": "node"}, "nodes, all"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "weights of rank 0"),
        ({"cpu_offload": "perhaps"}, "cpu_offload='perhaps': expected true or false"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
        (
            {"mixed_precision_policy": MixedPrecision(keep_low_precision_grads=True)},
            "mixed_precision_policy.keep_low_precision_grads=True: FSDP2 does not offer it",
        ),
        ({"mixed_precision_policy": "bf61"}, "Did you mean 'bf16'"),
        ({"mixed_precision_policy": {"parm_dtype": "bf16"}}, "Did you mean 'param_dtype'"),
    ],
)
def test_what_has_no_translation_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Plugin(**arguments)


def test_what_is_not_there_yet_says_so() -> None:
    with pytest.raises(ConfigError):
        Plugin(activation_checkpointing=True, activation_checkpointing_offload=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("no", False),
        ("false", False),
        ("Yes", True),
        ("on", True),
        (0, False),
        ({"offload_params": False}, False),
        ({"offload_params": "true"}, True),
        (None, None),
    ],
)
def test_a_switch_is_what_its_word_says(given: Any, expected: bool | None) -> None:
    assert Plugin(cpu_offload=given).given("cpu_offload") is expected
    if not isinstance(given, dict):
        assert Plugin(forward_prefetch=given).forward_prefetch is expected
    if isinstance(given, str):
        assert Plugin(reshard_after_forward=given).reshard_after_forward is expected


SHOWN = {
    "reshard_after_forward": True,
    "cpu_offload": False,
    "state_dict_type": StateDictType.FULL_STATE_DICT,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "cpu_ram_efficient_loading": False,
}


def test_fields_show_what_holds_and_count_as_not_given() -> None:
    for plugin in (Plugin(), dataclasses.replace(Plugin()), dataclasses.replace(Plugin(), **SHOWN)):
        assert {name: getattr(plugin, name) for name in SHOWN} == SHOWN
        assert not any(plugin.given(name) for name in SHOWN)
        assert plugin == Plugin()
        variables = {"FSDP_RESHARD_AFTER_FORWARD": "no", "FSDP_ACTIVATION_CHECKPOINTING": "yes"}
        filled = from_environment(plugin, ACCELERATE_USE_FSDP="1", **variables)
        assert (filled.reshard_after_forward, filled.activation_checkpointing) == (False, True)
    given = Plugin(reshard_after_forward=True)
    assert dataclasses.replace(given).given("reshard_after_forward") is True
    assigned = Plugin()
    assigned.reshard_after_forward = True
    assert assigned.given("reshard_after_forward") is True


VARIABLES = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Layer",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "1",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def from_environment(plugin: Plugin | None = None, **values: str) -> Plugin:
    with patched(**values):
        found = Problems()
        arguments = Arguments(plugins={"fsdp_plugin": plugin})
        chosen = choose(arguments, Environment.read(), "cpu", found).plugins.get("fsdp")
        found.raise_if()
    assert chosen is not None
    return chosen


def test_the_documented_variables_fill_the_plugin() -> None:
    plugin = from_environment(**VARIABLES)
    assert plugin.reshard_after_forward is False
    assert plugin.auto_wrap_policy == "transformer_based_wrap"
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Layer"]
    assert plugin.cpu_offload is True
    assert plugin.activation_checkpointing is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    with pytest.warns(FutureWarning):
        plugin = from_environment(
            ACCELERATE_USE_FSDP="1",
            FSDP_SHARDING_STRATEGY="2",
            FSDP_BACKWARD_PREFETCH="BACKWARD_PRE",
            FSDP_USE_ORIG_PARAMS="true",
        )
    assert plugin.reshard_after_forward is False
    plugin = from_environment(
        ACCELERATE_USE_FSDP="1",
        FSDP_MIN_NUM_PARAMS="10",
        FSDP_IGNORED_MODULES="head",
        FSDP_FORWARD_PREFETCH="1",
        FSDP_SYNC_MODULE_STATES="0",
    )
    assert (plugin.min_num_params, plugin.ignored_modules) == (10, "head")
    assert (plugin.forward_prefetch, plugin.sync_module_states) == (True, False)


def test_arguments_go_before_variables() -> None:
    given = Plugin(reshard_after_forward=True, min_num_params=5, cpu_offload=False)
    plugin = from_environment(given, **VARIABLES)
    assert plugin.reshard_after_forward is True
    assert (plugin.min_num_params, plugin.transformer_cls_names_to_wrap) == (5, None)
    assert plugin.cpu_offload is False
    assert plugin.activation_checkpointing is True


def test_wrong_variables_are_named() -> None:
    values = {"FSDP_MIN_NUM_PARAMS": "many", "FSDP_OFFLOAD_PARAMS": "perhaps"}
    with patched(ACCELERATE_USE_FSDP="1", **values), pytest.raises(ConfigError) as caught:
        resolve(Arguments(cpu=True), Environment.read())
    assert "FSDP_MIN_NUM_PARAMS='many'" in str(caught.value)
    assert "FSDP_OFFLOAD_PARAMS='perhaps'" in str(caught.value)


def test_inputs_are_cast_as_the_policy_says() -> None:
    def casts(given: Any) -> tuple[bool, bool]:
        formats = build_formats(Plugin(mixed_precision_policy=given).mixed_precision_policy, "no")
        return formats.root.cast_forward_inputs, formats.units.cast_forward_inputs

    assert casts({"param_dtype": "bf16"}) == (True, True)
    assert casts({"cast_forward_inputs": "no"}) == (False, False)
    assert casts({"cast_root_forward_inputs": False}) == (False, True)
    # The older wrapper's own defaults: what comes in from outside is cast, and nothing inside.
    assert casts(MixedPrecision()) == (True, False)
    assert casts(MixedPrecision(cast_forward_inputs=True)) == (True, True)
    assert casts(MixedPrecisionPolicy(cast_forward_inputs=False)) == (False, False)


def test_objects_of_torch_are_taken() -> None:
    plugin = Plugin(
        cpu_offload=CPUOffload(offload_params=True), mixed_precision_policy=MixedPrecision()
    )
    assert plugin.cpu_offload.offload_params


# -- fields that read as torch's own objects ----------------------------------------------------


def test_the_kind_of_state_dict_is_set() -> None:
    plugin = Plugin()
    plugin.set_state_dict_type()
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    full = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert plugin.optim_state_dict_config == full
    plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert plugin.saves_shards
    assert plugin.state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
    assert plugin.optim_state_dict_config == ShardedOptimStateDictConfig(offload_to_cpu=True)
    with pytest.raises(ConfigError, match="state_dict_type"):
        plugin.set_state_dict_type("SOME_STATE_DICT")
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    copied = pickle.loads(pickle.dumps(plugin))
    assert copied == plugin
    assert copied.saves_shards


@pytest.mark.parametrize("kind", list(StateDictType)[:1] + list(StateDictType)[2:])
def test_a_kind_reads_as_the_member_that_was_given(kind: StateDictType) -> None:
    for given in (kind, kind.name, kind.name.lower()):
        assert Plugin(state_dict_type=given).state_dict_type is kind


def test_a_config_of_state_dicts_warns_if_it_asks_for_something_else() -> None:
    Plugin(state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True))
    with pytest.warns(FutureWarning, match="state_dict_config needs no argument"):
        plugin = Plugin(state_dict_config=FullStateDictConfig(offload_to_cpu=False))
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def test_a_plugin_built_by_hand_takes_the_variables_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    plugin = Plugin(reshard_after_forward=True)
    assert plugin.reshard_after_forward is True
    assert plugin.activation_checkpointing is True
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "perhaps")
    with pytest.raises(ConfigError, match="FSDP_ACTIVATION_CHECKPOINTING='perhaps'"):
        Plugin()


# -- setters, for libraries that shard models by themselves ----------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 4)


class Model(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(4, 1)


def units(plugin: Plugin, model: torch.nn.Module) -> list[str]:
    """Return the names of the units that the plugin makes of a model."""
    names = {id(module): name for name, module in model.named_modules()}
    return sorted(names[id(module)] for module in find_units(model, plugin, set()))


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Linear"},
        {"auto_wrap_policy": "transformer_based_wrap"},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20},
        {"auto_wrap_policy": "no_wrap"},
        {},
    ],
)
def test_a_policy_becomes_a_function_with_the_same_units(fields: dict[str, object]) -> None:
    plugin, model = Plugin(**fields), Model()
    before = units(plugin, model)
    plugin.set_auto_wrap_policy(model)
    assert units(plugin, model) == before
    named = "based" in str(fields.get("auto_wrap_policy"))
    assert isinstance(plugin.auto_wrap_policy, functools.partial) is named


def test_classes_that_a_model_lacks_are_named() -> None:
    names = {"transformer_cls_names_to_wrap": ["Blok", "Block"]}
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", **names)
    with pytest.raises(ConfigError, match="Blok"):
        plugin.set_auto_wrap_policy(Model())


def test_a_class_is_found_by_its_name() -> None:
    assert get_module_class_from_name(Model(), "Block") is Block
    assert get_module_class_from_name(Model(), "Model") is Model
    assert get_module_class_from_name(Model(), "Blok") is None


def test_a_precision_becomes_a_policy() -> None:
    plugin = Plugin()
    plugin.set_mixed_precision("bf16")
    policy = plugin.mixed_precision_policy
    assert isinstance(policy, MixedPrecisionPolicy)
    assert build_formats(policy, "no") == build_formats("bf16", "no")
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy is policy
    plugin.set_mixed_precision("fp16", override=True)
    assert plugin.mixed_precision_policy.param_dtype == torch.float16
    plugin.set_mixed_precision("bf16", buffer_autocast=True, override=True)
    assert build_formats(plugin.mixed_precision_policy, "no").buffers == torch.bfloat16
    with pytest.raises(ConfigError, match="mixed_precision"):
        plugin.set_mixed_precision("fp8")


def test_offloading_becomes_a_policy() -> None:
    plugin = Plugin(cpu_offload=True)
    plugin.set_cpu_offload()
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    plugin.validate_cpu_offload()
    plugin = Plugin(cpu_offload=False)
    plugin.set_cpu_offload()
    assert type(plugin.cpu_offload) is OffloadPolicy
    plugin.cpu_offload = "sometimes"
    with pytest.raises(ConfigError, match="cpu_offload='sometimes'"):
        plugin.validate_cpu_offload()


def test_an_assigned_policy_is_checked() -> None:
    plugin = Plugin()
    plugin.validate_mixed_precision_policy()
    plugin.mixed_precision_policy = {"param_dtype": "bf17"}
    with pytest.raises(ConfigError, match="bf17"):
        plugin.validate_mixed_precision_policy()
