"""E1: plugins that are built by hand take the variables of a launcher for absent arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import ConfigError


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
