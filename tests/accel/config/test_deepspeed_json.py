"""What a configuration of DeepSpeed can say, and what is named in it before there is an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_json import HfDeepSpeedConfig
from accel.errors import ConfigError
from tests.accel.strategies.deepspeed.test_settings import completed, plan_of


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {"stage": 3}}, "Did you mean zero_optimization"),
        ({"zero_optimization": {"stage": 7}}, r"stage=7: it is one of 0, 1, 2, 3"),
        ({"zero_optimization": 3}, "zero_optimization=3: it is a section"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "offload_param='cpu': it is a section"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "one of none, cpu, nvme"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "needs a folder on a disk"),
        ({"zero_optimization": {"stage": "3"}}, "it is a number. Write 3 without quotes"),
        ({"zero_optimization": {"stage": True}}, "stage=True: it is one of 0, 1, 2, 3"),
        ({"bf16": True}, 'bf16=True: it is a section. Write {"enabled": true}'),
        ({"optimizer": {"type": "SGD", "params": [1]}}, r"optimizer.params=\[1\]: it is a section"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled='yes': it is true, false or"),
        ({"gradient_accumulation_steps": "4"}, "steps='4': it is a whole number"),
        ({"train_batch_size": 0}, "train_batch_size=0: it is a whole number, at least 1"),
        ({"gradient_clipping": True}, "gradient_clipping=True: it is the largest norm"),
        ({"bfloat16": {"enabled": True}}, "Write bf16 in its place"),
        ({"zero_optimization": {"cpu_offload": True}}, "Write offload_optimizer in its place"),
        ({"zero_optimization": {"cpu_offload_param": True}}, "Write offload_param in its place"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size=2: this version spreads"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2: this version spreads"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled=True: this version"),
    ],
)
def test_values_that_a_configuration_cannot_have_are_named(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        completed(DeepSpeedPlugin(config))


def test_what_is_off_or_null_in_a_configuration_says_nothing() -> None:
    config = {
        "fp16": None,
        "optimizer": None,
        "zero_optimization": {"stage": "auto", "offload_param": None},
        "sequence_parallel_size": 1,
        "tensor_parallel": {"autotp_size": 0},
        "expert_parallel": {"enabled": False},
    }
    found = completed(DeepSpeedPlugin(config, offload_param_device="none"))
    assert found["zero_optimization"]["offload_param"] == {"device": "none"}
    assert found.keys() >= {"sequence_parallel_size", "tensor_parallel"}
    assert not found.keys() & {"fp16", "optimizer"}


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        plan_of(DeepSpeedPlugin(str(tmp_path / "absent.json")))
    broken = tmp_path / "broken.json"
    broken.write_text("{,}")
    with pytest.raises(ConfigError, match="is no JSON"):
        plan_of(DeepSpeedPlugin(broken))


def test_a_configuration_answers_by_dotted_keys() -> None:
    config = HfDeepSpeedConfig(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "a": {"b": False}}
    )
    assert config.is_zero3()
    assert not config.is_zero2()
    assert config.is_offload()
    assert config.is_false("a.b")
    assert not config.is_false("a.c")
    assert not config.is_true("a.b")
    assert config.get_value("a.c", 5) == 5
    assert DeepSpeedPlugin(config).stage == 3


def test_what_is_written_into_a_plugins_configuration_holds(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"}}')
    plugin = DeepSpeedPlugin(str(path), gradient_clipping=0.5)
    config = plugin.deepspeed_config
    zero = config["zero_optimization"]
    config["train_micro_batch_size_per_gpu"] = 4
    assert plugin.stage == 1
    zero["stage"] = 3  # of a section that was taken before
    zero.setdefault("offload_param", {})["device"] = "cpu"
    config.pop("optimizer")
    assert plugin.deepspeed_config is config
    assert plugin.stage == 3
    found = completed(plugin, [4])
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert "optimizer" not in found
    with pytest.raises(ConfigError, match="gpu=4 with batch_size=8 of the prepared loaders"):
        completed(plugin, [8])
    config["optimizer"] = {"type": "AdamW"}
    config["optimizer"]["params"] = {"lr": 0.5}
    assert plugin.given_config()["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5}}
    assert json.dumps(config) == json.dumps(plugin.deepspeed_config)
    assert json.loads(path.read_text())["zero_optimization"] == {"stage": 1}
    config["bf16"] = True
    with pytest.raises(ConfigError, match="bf16=True: it is a section"):
        plugin.get_value("bf16.enabled")


def test_the_field_tells_the_stage_that_the_configuration_decides() -> None:
    for config, stage in (({"zero_optimization": {"stage": 3}}, 3), ({}, 2), (None, 2)):
        plugin = DeepSpeedPlugin(config)
        plugin.settle()
        assert plugin.zero_stage == stage
        plugin.deepspeed_config["zero_optimization"]["stage"] = 1
        assert (plugin.stage, plugin.zero_stage) == (1, 1)
        assert completed(plugin)["zero_optimization"]["stage"] == 1
    plugin = DeepSpeedPlugin(zero_stage=0)
    plugin.settle()
    assert plugin.zero_stage == 0
    plugin = DeepSpeedPlugin()
    plugin.settle()
    plugin.zero_stage = 3
    assert completed(plugin)["zero_optimization"]["stage"] == 3
