"""DeepSpeed's configuration: validation and dotted keys (E1, E5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_json import HfDeepSpeedConfig
from accel.machine.errors import ConfigError
from tests.accel.strategies.deepspeed.helpers import completed, plan_of


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {"stage": 3}}, "Did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stage": 7}}, r"stage=7: it is one of 0, 1, 2, 3"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "one of none, cpu, nvme"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "needs a folder on a disk"),
        ({"zero_optimization": {"stage": "3"}}, "expected a number. Write 3 without quotes"),
        ({"bf16": True}, "bf16=True: expected a section. Write its keys"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled='yes': expected true, false or"),
        ({"gradient_accumulation_steps": "4"}, "steps='4': expected an integer"),
        ({"train_batch_size": 0}, "train_batch_size=0: expected an integer, at least 1"),
        ({"bfloat16": {"enabled": True}}, "Write bf16 in its place"),
        ({"zero_optimization": {"cpu_offload": True}}, "Write offload_optimizer in its place"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2: this version supports ZeRO only"),
    ],
)
def test_values_that_a_configuration_cannot_have_are_named(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        completed(DeepSpeedPlugin(config))


@pytest.mark.parametrize(
    ("key", "known"),
    [("train_micro_batch_size", "train_micro_batch_size_per_gpu"), ("FP16", "fp16")],
)
def test_a_mistyped_key_is_named(key: str, known: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: unknown key. Did you mean '{known}'?"):
        HfDeepSpeedConfig({key: 1})


@pytest.mark.parametrize("key", ["hybrid_engine", "checkpoint_folder"])
def test_further_keys_of_deepspeed_and_of_users_are_left_alone(key: str) -> None:
    assert HfDeepSpeedConfig({key: 1}).config == {key: 1}


def test_sections_that_are_off_or_null_have_no_effect() -> None:
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


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        plan_of(DeepSpeedPlugin(str(tmp_path / "absent.json")))
    broken = tmp_path / "broken.json"
    broken.write_text("{,}")
    with pytest.raises(ConfigError, match="the file is not JSON"):
        plan_of(DeepSpeedPlugin(broken))


def test_a_configuration_answers_by_dotted_keys() -> None:
    config = HfDeepSpeedConfig(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "a": {"b": False}}
    )
    assert config.is_zero3() is True
    assert config.is_zero2() is False
    assert HfDeepSpeedConfig({"zero_optimization": {"stage": 2}}).is_zero2() is True
    assert config.is_offload() is True
    assert config.is_true("zero_optimization.stage") is True
    assert config.is_false("a.b")
    assert not config.is_false("a.c")
    assert not config.is_true("a.b")
    assert config.get_value("a.c", 5) == 5
    assert DeepSpeedPlugin(config).stage == 3


def test_a_file_gives_its_path_to_messages(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    config = HfDeepSpeedConfig(str(path))
    assert config.is_zero2()
    assert config.place == HfDeepSpeedConfig(config).place == str(path)
    assert HfDeepSpeedConfig({}).place == "hf_ds_config"


def test_libraries_fill_in_and_delete_by_dotted_keys() -> None:
    config = HfDeepSpeedConfig({"train_batch_size": 8, "optimizer": {"params": {"lr": "auto"}}})
    section, last = config.find_config_node("optimizer.params.lr")
    assert section is not None
    section[last] = 0.5
    assert config.get_value("optimizer.params.lr") == 0.5
    assert config.find_config_node("train_batch_size") == (config.config, "train_batch_size")
    assert config.find_config_node("fp16.enabled") == (None, "enabled")
    config.del_config_sub_tree("optimizer.params")
    assert config.config == {"train_batch_size": 8, "optimizer": {}}
    config.del_config_sub_tree("optimizer.params")
    with pytest.raises(ValueError, match="it is not set"):
        config.del_config_sub_tree("optimizer.params", must_exist=True)
