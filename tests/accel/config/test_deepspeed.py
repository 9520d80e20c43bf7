"""DeepSpeed's plugin: fields, environment, its one configuration, and the active one of several.

Holds E1, E5.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accel.config.deepspeed import DeepSpeedPlugin, active, get_active_deepspeed_plugin
from accel.config.deepspeed_json import HfDeepSpeedConfig
from accel.config.training import GradientAccumulationPlugin
from accel.machine.env import Environment, patched
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.plan import resolve
from tests.accel.strategies.deepspeed.helpers import completed, plan_of


def test_the_environment_fills_what_the_plugin_leaves_out(tmp_path: Path) -> None:
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Experts",
    }
    with patched(**variables):
        plan = resolve(Arguments(cpu=True), Environment.read())
        plugin = active(plan.plugin("deepspeed"))
        assert plugin is not None
        assert (plugin.zero_stage, plugin.gradient_clipping) == (3, 0.5)
        assert (plugin.offload_optimizer_device, plugin.offload_param_device) == ("cpu", "none")
        assert plugin.is_zero3_init_enabled()
        assert plugin.zero3_save_16bit_model
        assert plugin.transformer_moe_cls_names == "Experts"
        assert plan.accumulation.num_steps == 2
        with pytest.raises(ConfigError, match="ZERO_STAGE=3"):
            completed(DeepSpeedPlugin({"zero_optimization": {"stage": 1}}))
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 5}')
    with patched(ACCELERATE_USE_DEEPSPEED="1", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path)):
        plan = resolve(Arguments(cpu=True), Environment.read())
        assert active(plan.plugin("deepspeed")) is not None
        assert active(plan.plugin("deepspeed")).stage == 1
        assert plan.accumulation.num_steps == 5
    with patched(ACCELERATE_USE_DEEPSPEED="1", ACCELERATE_GRADIENT_CLIPPING="auto"):
        plan = resolve(Arguments(cpu=True), Environment.read())
        assert active(plan.plugin("deepspeed")) is not None
        assert active(plan.plugin("deepspeed")).given("gradient_clipping") is None
    with patched(ACCELERATE_USE_DEEPSPEED="1", ACCELERATE_DEEPSPEED_ZERO_STAGES="3"):
        with pytest.raises(ConfigError, match="Did you mean 'ACCELERATE_DEEPSPEED_ZERO_STAGE'"):
            resolve(Arguments(cpu=True), Environment.read())


def test_the_configuration_decides_accumulation_and_precision_that_the_run_leaves_open() -> None:
    config = {"gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    plan = plan_of(DeepSpeedPlugin(config))
    assert (plan.accumulation.num_steps, plan.mixed_precision) == (4, "bf16")
    with pytest.raises(ConfigError) as error:
        completed(
            DeepSpeedPlugin(config),
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )
    assert len(error.value.problems) == 2


def test_values_out_of_range_are_told_together() -> None:
    with pytest.raises(ConfigError) as error:
        DeepSpeedPlugin(
            zero_stage=4,
            gradient_clipping=-1.0,
            offload_param_device="disk",
            offload_optimizer_device="nvme",
            msamp_opt_level="O7",
        )
    assert len(error.value.problems) == 5


def test_fp16_on_a_cpu_and_ms_amp_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="'fp16' under DeepSpeed on a CPU"):
        plan_of(DeepSpeedPlugin(), mixed_precision="fp16")
    with pytest.raises(ConfigError, match="enable_msamp"):
        plan_of(DeepSpeedPlugin(enable_msamp=True))


def test_one_of_several_plugins_is_selected() -> None:
    first, second = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)
    plan = resolve(
        Arguments(cpu=True, plugins={"deepspeed_plugins": {"student": first, "teacher": second}}),
        Environment.read(),
    )
    assert active(plan.plugin("deepspeed")) is first
    assert (first.selected, second.selected) == (True, False)
    second.select()
    assert active(plan.plugin("deepspeed")) is second
    assert (first.selected, second.selected) == (False, True)


def test_init_at_stage_three_is_switched_inside_a_context() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=True):
        assert plugin.given("zero3_init_flag")
    assert plugin.given("zero3_init_flag") is None
    assert plugin.is_zero3_init_enabled()  # of transformers
    with pytest.warns(UserWarning, match="zero3_init_flag=True has no effect under ZeRO 2"):
        assert DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag is False


def test_changes_of_a_plugins_configuration_hold(tmp_path: Path) -> None:
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
    assert plugin.deepspeed_config["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5}}
    assert json.dumps(config) == json.dumps(plugin.deepspeed_config)
    assert json.loads(path.read_text())["zero_optimization"] == {"stage": 1}
    config["bf16"] = True
    with pytest.raises(ConfigError, match="bf16=True: expected a section"):
        plugin.get_value("bf16.enabled")


SHOWN = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_stage": 2,
    "is_train_batch_min": True,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": "none",
    "offload_param_nvme_path": "none",
    "zero3_init_flag": False,
    "zero3_save_16bit_model": False,
    "transformer_moe_cls_names": None,
    "enable_msamp": False,
    "msamp_opt_level": "O1",
}


def test_fields_that_nobody_gave_show_what_holds(tmp_path: Path) -> None:
    plugin = DeepSpeedPlugin()
    assert {name: getattr(plugin, name) for name in SHOWN} == SHOWN
    assert {name for name in SHOWN if plugin.given(name) is not None} == {"is_train_batch_min"}
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
    }
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    expected = {
        "zero_stage": 3,
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/disk",
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "zero3_save_16bit_model": True,
        "zero3_init_flag": True,
    }
    for given in (config, str(path)):
        plugin = DeepSpeedPlugin(given)
        assert {name: getattr(plugin, name) for name in SHOWN} == {**SHOWN, **expected}
        assert not any(plugin.given(name) for name in expected)
    assert DeepSpeedPlugin("no such file").zero_stage == 2  # the run reports it


def test_the_outline_of_a_configuration_reaches_no_engine() -> None:
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=2)
    assert plugin.is_auto("train_batch_size")
    config = plugin.deepspeed_config
    assert config["gradient_accumulation_steps"] == 2
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "none", "nvme_path": None}
    stated = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}
    assert plugin.stated_config() == stated
    plugin.offload_optimizer_device = "cpu"
    assert plugin.get_value("zero_optimization.offload_optimizer.device") == "cpu"
    plugin.offload_optimizer_device = None
    assert plugin.get_value("zero_optimization.offload_optimizer.device") == "none"
    assert plugin.offload_optimizer_device == "none"
    config["zero_optimization"]["offload_param"]["device"] = "cpu"
    assert plugin.offload_param_device == "none"  # until the configuration is read again
    assert plugin.stated_config()["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert plugin.offload_param_device == "cpu"
    assert DeepSpeedPlugin({"zero_optimization": {}}).deepspeed_config == {
        "zero_optimization": {"stage": 2}
    }


def test_a_configuration_can_be_replaced() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.hf_ds_config = HfDeepSpeedConfig(plugin.hf_ds_config.config)
    plugin.deepspeed_config = plugin.hf_ds_config.config
    assert plugin.deepspeed_config is plugin.hf_ds_config.config
    plugin.deepspeed_config = {"train_batch_size": 4}
    assert plugin.hf_ds_config.config["train_batch_size"] == 4
    assert plugin.stage == 3
    plugin.hf_ds_config = {"zero_optimization": {"stage": 3}, "train_batch_size": 2}
    assert plugin.deepspeed_config["train_batch_size"] == 2
    assert plugin.hf_ds_config.config is plugin.deepspeed_config


def test_transformers_reads_a_configuration_without_open_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[HfDeepSpeedConfig] = []
    module = ModuleType("transformers.integrations.deepspeed")
    module.set_hf_deepspeed_config = told.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.integrations", ModuleType("integrations"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.set_deepspeed_weakref()
    assert told[0].is_zero3()
    assert told[0].config["train_micro_batch_size_per_gpu"] == 1
    assert "train_batch_size" not in told[0].config
    assert plugin.is_auto("train_batch_size")


def test_leaf_modules_are_named_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[object] = []
    utils = ModuleType("deepspeed.utils")
    utils.set_z3_leaf_modules = lambda model, kinds: marked.append(kinds)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    DeepSpeedPlugin().set_moe_leaf_modules(model)
    assert marked == []
    DeepSpeedPlugin(transformer_moe_cls_names="Linear").set_moe_leaf_modules(model)
    assert marked == [[torch.nn.Linear]]
    with pytest.raises(ConfigError, match="Linaer"):
        DeepSpeedPlugin(transformer_moe_cls_names="Linaer").set_moe_leaf_modules(model)


def test_the_active_one_of_a_state() -> None:
    plugin = DeepSpeedPlugin()
    assert get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=plugin)) is plugin
    with pytest.raises(ConfigError, match="DeepSpeed is off"):
        get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=None))


def test_a_plugin_built_by_hand_takes_the_variables_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
