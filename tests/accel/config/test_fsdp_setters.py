"""The setters of the FSDP plugin, for libraries that shard models by themselves (E1, E5)."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from accel.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.config.fsdp import get_module_class_from_name
from accel.machine.errors import ConfigError
from accel.strategies.mesh.parallelize import build_formats
from accel.strategies.mesh.units import find_units


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
