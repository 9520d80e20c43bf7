"""E1: plugins that are built by hand take the variables of a launcher for absent arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.parallelism import ParallelismConfig
from accel.config.training import TorchDynamoPlugin
from accel.machine.errors import ConfigError


def test_sizes_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    config = ParallelismConfig(tp_size=1)
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size) == (1, 4, 1)
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "many")
    with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_DP_SHARD_SIZE='many'"):
        ParallelismConfig()


def test_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=True)
    assert plugin.reshard_after_forward is True
    assert plugin.activation_checkpointing is True
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "perhaps")
    with pytest.raises(ConfigError, match="FSDP_ACTIVATION_CHECKPOINTING='perhaps'"):
        FullyShardedDataParallelPlugin()


def test_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "1")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "0")
    plugin = TorchDynamoPlugin(dynamic=False)
    assert (plugin.backend, plugin.mode, plugin.fullgraph) == ("inductor", "max-autotune", True)
    assert (plugin.dynamic, plugin.use_regional_compilation) == (False, False)
    assert TorchDynamoPlugin(backend="no", mode="default").backend == "no"
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "perhaps")
    with pytest.raises(ConfigError, match="ACCELERATE_DYNAMO_USE_FULLGRAPH='perhaps'"):
        TorchDynamoPlugin()


def test_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "steps_per_print": 7}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    plugin = DeepSpeedPlugin(gradient_clipping=2.0)
    assert plugin.gradient_clipping == 2.0
    assert plugin.zero_stage == 3
    assert plugin.deepspeed_config["steps_per_print"] == 7
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "high")
    with pytest.raises(ConfigError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE='high'"):
        DeepSpeedPlugin()
