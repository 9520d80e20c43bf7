"""E1: fields that nobody gave read as in the documented package, or the reason is here.

Needs the extra `compare`, which nothing else does: ``pip install -e .[compare]``.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

import accel.utils
from tests.documentation.player import DOCUMENTED

pytest.importorskip(DOCUMENTED, reason="the extra `compare` installs it")

JSON = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
MADE: list[tuple[str, Mapping[str, object]]] = [
    ("FullyShardedDataParallelPlugin", {"fsdp_version": 2}),
    ("FullyShardedDataParallelPlugin", {"fsdp_version": 2, "activation_checkpointing": True}),
    ("FullyShardedDataParallelPlugin", {"fsdp_version": 2, "reshard_after_forward": False}),
    ("DeepSpeedPlugin", {}),
    ("DeepSpeedPlugin", {"zero_stage": 3, "gradient_clipping": 1.0}),
    ("DeepSpeedPlugin", {"gradient_accumulation_steps": 4, "offload_optimizer_device": "cpu"}),
    ("DeepSpeedPlugin", {"hf_ds_config": JSON}),
    ("TorchTensorParallelPlugin", {}),
    ("GradientAccumulationPlugin", {}),
    ("TorchDynamoPlugin", {}),
    ("ProjectConfiguration", {}),
    ("ProjectConfiguration", {"project_dir": "runs"}),
    ("DataLoaderConfiguration", {}),
    ("AutocastKwargs", {}),
    ("DistributedDataParallelKwargs", {}),
    ("GradScalerKwargs", {}),
    ("InitProcessGroupKwargs", {}),
    ("ProfileKwargs", {}),
    ("MSAMPRecipeKwargs", {}),
    ("ParallelismConfig", {}),
]
FULL = "full state dicts are saved unless another kind is given, under either version"
DIFFERENT = {
    "FullyShardedDataParallelPlugin.cpu_offload": "false; this module imports no torch",
    "FullyShardedDataParallelPlugin.state_dict_type": FULL,
    "FullyShardedDataParallelPlugin.state_dict_config": FULL,
    "FullyShardedDataParallelPlugin.optim_state_dict_config": FULL,
    "DeepSpeedPlugin.hf_ds_config": "an object, which each package has of its own",
    "DeepSpeedPlugin.gradient_accumulation_steps": "of the run where a configuration has none",
    "TorchDynamoPlugin.mode": "None is the mode of a backend that has one",
    "TorchDynamoPlugin.use_regional_compilation": "None depends on the strategy",
    "InitProcessGroupKwargs.timeout": "None is torch's own, which the backend decides",
}


def read(package: str, name: str, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a new object of the package, enumerations by their members' names."""
    with mock.patch.dict(os.environ):  # the documented package sets variables of its own
        kind = getattr(importlib.import_module(package), name, None)
        kind = kind or getattr(importlib.import_module(f"{package}.utils"), name)
        made = kind(**arguments)
    values = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return {k: v.name if isinstance(v, enum.Enum) else v for k, v in values.items()}


@pytest.mark.parametrize(("name", "arguments"), MADE, ids=lambda one: str(one))
def test_fields_read_as_documented(name: str, arguments: Mapping[str, object]) -> None:
    theirs, ours = read(DOCUMENTED, name, arguments), read("accel", name, arguments)
    differing = {f"{name}.{field}" for field in theirs if ours[field] != theirs[field]}
    assert differing - set(DIFFERENT) == set()


def test_a_plugins_own_configuration_has_the_documented_outline() -> None:
    with mock.patch.dict(os.environ):
        theirs = importlib.import_module(DOCUMENTED).DeepSpeedPlugin().deepspeed_config
    ours = accel.utils.DeepSpeedPlugin().deepspeed_config
    assert ours == {key: value for key, value in theirs.items() if key != "steps_per_print"}
