"""DeepSpeed's configuration: filled from the run, and every contradiction told in one error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_plugins import active, get_active_deepspeed_plugin
from accel.config.handlers import (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from accel.config.training import GradientAccumulationPlugin
from accel.env import Environment, patched
from accel.errors import ConfigError, NotBuiltError, StateError
from accel.parallel import data_parallel
from accel.planning.arguments import Arguments
from accel.planning.plan import Plan, resolve
from accel.state import AcceleratorState
from accel.strategies.deepspeed.dummies import DummyOptim, DummyScheduler
from accel.strategies.deepspeed.options import ignored
from accel.strategies.deepspeed.settings import Settings, hidden_size
from tests.helpers import run_distributed


def plan_of(plugin: DeepSpeedPlugin, **arguments: Any) -> Plan:
    given = {"cpu": True, "deepspeed_plugin": plugin, **arguments}
    return resolve(Arguments.of(given), Environment.read())


def completed(
    plugin: DeepSpeedPlugin,
    sizes: list[int] | None = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    replicas: int = 2,
    **arguments: Any,
) -> dict[str, Any]:
    plan = replace(plan_of(plugin, **arguments), parallel_dims=data_parallel(replicas, 0))
    settings = Settings(plugin, plan)
    settings.follow_run(sizes or [4])
    settings.follow_optimizer(optimizer, "cpu")
    settings.follow_scheduler(scheduler, optimizer)
    settings.follow_model(model or torch.nn.Linear(6, 5))
    return settings.finish()


def told_by(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(error.value)


def test_every_mismatch_is_told_in_one_error_that_names_both_places(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    config = {
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": False},
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 16,
        "train_batch_size": 99,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    path.write_text(json.dumps(config))
    plugin = DeepSpeedPlugin(
        str(path), gradient_clipping=1.0, zero_stage=2, offload_optimizer_device="none"
    )
    with pytest.raises(ConfigError) as error:
        completed(plugin, [8], gradient_accumulation_steps=2, mixed_precision="bf16")
    text = told_by(error)
    assert len(error.value.problems) == 7
    for place, source in (
        ("gradient_accumulation_steps=4", "Accelerator(gradient_accumulation_steps=2)"),
        ("bf16.enabled=False", "Accelerator(mixed_precision='bf16')"),
        ("gradient_clipping=0.5", "DeepSpeedPlugin(gradient_clipping=1.0)"),
        ("train_micro_batch_size_per_gpu=16", "batch_size=8 of the prepared loaders"),
        ("train_batch_size=99", "16 samples × 2 micro-batches × 2 processes"),
        ("zero_optimization.stage=3", "DeepSpeedPlugin(zero_stage=2)"),
        ("offload_optimizer.device='cpu'", "DeepSpeedPlugin(offload_optimizer_device='none')"),
    ):
        assert f"{path}: " in text
        assert place in text
        assert source in text


def test_auto_values_come_from_the_run() -> None:
    auto = "auto"
    config = {
        "train_batch_size": auto,
        "train_micro_batch_size_per_gpu": auto,
        "gradient_accumulation_steps": auto,
        "gradient_clipping": auto,
        "bf16": {"enabled": auto},
        "fp16": {"enabled": auto},
        "optimizer": {"type": "AdamW", "params": {"lr": auto, "weight_decay": auto}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": auto,
                "warmup_max_lr": auto,
                "warmup_num_steps": auto,
                "total_num_steps": auto,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": auto,
            "stage3_prefetch_bucket_size": auto,
            "stage3_param_persistence_threshold": auto,
        },
    }
    model = torch.nn.Linear(6, 5)
    optimizer = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.2)
    found = completed(
        DeepSpeedPlugin(config, gradient_clipping=0.7),
        [8, 4],
        model,
        optimizer,
        DummyScheduler(optimizer, total_num_steps=21, warmup_num_steps=4),
        gradient_accumulation_steps=3,
        mixed_precision="bf16",
    )
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["train_batch_size"] == 4 * 3 * 2
    assert found["gradient_accumulation_steps"] == 3
    assert found["gradient_clipping"] == 0.7
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (True, False)
    assert found["optimizer"]["params"] == {"lr": 0.01, "weight_decay": 0.2, "torch_adam": True}
    assert found["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.01,
        "warmup_num_steps": 2,
        "total_num_steps": 11,
    }
    zero = found["zero_optimization"]
    assert zero["reduce_bucket_size"] == 36
    assert zero["stage3_prefetch_bucket_size"] == 32
    assert zero["stage3_param_persistence_threshold"] == 60
    assert config["train_batch_size"] == auto  # the caller's own is left alone


def test_auto_values_of_the_plugins_own_fields_are_the_fields_or_their_defaults() -> None:
    auto = "auto"
    gathers = "stage3_gather_16bit_weights_on_model_save"
    zero = {
        "stage": 3,
        gathers: auto,
        "offload_optimizer": {"device": auto, "nvme_path": auto},
        "offload_param": {"device": auto, "nvme_path": auto},
    }
    found = completed(DeepSpeedPlugin({"zero_optimization": zero}))["zero_optimization"]
    assert found[gathers] is False
    assert found["offload_optimizer"] == found["offload_param"] == {"device": "none"}
    plugin = DeepSpeedPlugin(
        {"zero_optimization": zero}, zero3_save_16bit_model=True, offload_param_device="cpu"
    )
    found = completed(plugin)["zero_optimization"]
    assert (found[gathers], found["offload_param"]) == (True, {"device": "cpu"})
    plugin = DeepSpeedPlugin({"zero_optimization": zero}, offload_optimizer_device="nvme")
    with pytest.raises(ConfigError, match="needs a folder on a disk"):
        completed(plugin)


def test_the_largest_batch_counts_if_asked_for() -> None:
    plugin = DeepSpeedPlugin(is_train_batch_min=False)
    assert completed(plugin, [8, 4])["train_micro_batch_size_per_gpu"] == 8


def test_an_auto_that_nothing_tells_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile_step"):
        completed(DeepSpeedPlugin({"flops_profiler": {"profile_step": "auto"}}))


def test_the_width_is_the_models_own_or_that_of_most_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Linear(9, 9), torch.nn.Linear(9, 2))
    assert hidden_size(model) == 9
    model.config = type("Config", (), {"hidden_size": 64})()  # type: ignore[assignment]
    assert hidden_size(model) == 64


def test_optimizer_and_scheduler_have_one_owner() -> None:
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    sections = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    with pytest.raises(ConfigError) as error:
        completed(DeepSpeedPlugin(sections), None, model, optimizer, scheduler)
    assert "optimizer with AdamW in prepare" in told_by(error)
    assert "scheduler with LambdaLR in prepare" in told_by(error)
    dummy = DummyOptim(model.parameters())
    with pytest.raises(ConfigError) as error:
        completed(DeepSpeedPlugin(), None, model, dummy, DummyScheduler(dummy))
    assert "has no optimizer" in told_by(error)
    assert "has no scheduler" in told_by(error)
    sections = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    with pytest.raises(ConfigError, match="scheduler, and prepare was given none"):
        completed(DeepSpeedPlugin(sections), None, model, dummy)
    assert "scheduler" not in completed(DeepSpeedPlugin(sections), None, model)


def test_stand_ins_fill_what_is_left_out_and_contradict_nothing() -> None:
    model = torch.nn.Linear(6, 5)
    dummy = DummyOptim(model.parameters(), lr=0.05, betas=(0.5, 0.6))
    found = completed(DeepSpeedPlugin({"optimizer": {"type": "SGD"}}), None, model, dummy)
    expected = {"lr": 0.05, "weight_decay": 0, "betas": (0.5, 0.6)}
    assert found["optimizer"]["params"] == expected
    params = {"lr": 0.01, "weight_decay": 0.3, "betas": [0.5, 0.6]}
    config = {"optimizer": {"type": "SGD", "params": params}}
    with pytest.raises(ConfigError) as error:
        completed(DeepSpeedPlugin(config), None, model, dummy)
    assert "optimizer.params.lr=0.01 with DummyOptim(lr=0.05)" in told_by(error)
    assert len(error.value.problems) == 1

    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    dummy = DummyOptim(groups)
    assert completed(DeepSpeedPlugin(config), None, model, dummy)["optimizer"]["params"] == params
    assert [sorted(group) for group in dummy.params] == [["lr", "params"], ["params"]]
    schedule = torch.optim.lr_scheduler.LambdaLR(dummy, lambda step: 1.0)
    with pytest.raises(ConfigError, match=r"lr=0.01 with LambdaLR on DummyOptim\(lr=0.001\)"):
        completed(DeepSpeedPlugin(config), None, model, dummy, schedule)


def scheduled(kind: str, params: dict[str, Any], dummy: Any, **steps: Any) -> dict[str, Any]:
    """The section's parameters, completed from `DummyScheduler(dummy, **steps)`."""
    config: dict[str, Any] = {"scheduler": {"type": kind, "params": params}}
    if isinstance(dummy, DummyOptim):
        config["optimizer"] = {"type": "SGD"}
    scheduler = DummyScheduler(dummy, **steps)
    found = completed(DeepSpeedPlugin(config), optimizer=dummy, scheduler=scheduler)
    return dict(found["scheduler"]["params"])


def test_a_schedule_takes_from_its_stand_in_what_the_configuration_leaves_out() -> None:
    model = torch.nn.Linear(6, 5)
    dummy = DummyOptim(model.parameters(), lr=0.02)
    steps = {"warmup_num_steps": 4, "total_num_steps": 21}
    assert scheduled("WarmupLR", {}, dummy, **steps) == {
        "warmup_max_lr": 0.02,
        "warmup_num_steps": 2,
    }
    assert scheduled("WarmupDecayLR", {"warmup_num_steps": 2}, dummy, **steps) == {
        "warmup_max_lr": 0.02,
        "warmup_num_steps": 2,
        "total_num_steps": 11,
    }
    cosine = scheduled("WarmupCosineLR", {"cos_min_ratio": 0.1}, dummy, **steps)
    assert cosine == {"cos_min_ratio": 0.1, "warmup_num_steps": 2, "total_num_steps": 11}
    assert scheduled("StepLR", {"step_size": 5}, dummy, **steps) == {"step_size": 5}
    own = DummyOptim([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    assert scheduled("WarmupLR", {"warmup_max_lr": "auto"}, own)["warmup_max_lr"] == [0.5, 0.001]


def test_a_schedule_and_its_stand_in_do_not_disagree() -> None:
    model = torch.nn.Linear(6, 5)
    dummy = DummyOptim(model.parameters(), lr=0.02)
    params = {"warmup_num_steps": 100, "warmup_max_lr": 0.5, "total_num_steps": 1000}
    with pytest.raises(ConfigError) as error:
        scheduled("WarmupDecayLR", params, dummy, warmup_num_steps=4, total_num_steps=21)
    text = told_by(error)
    assert len(error.value.problems) == 3
    for value, source in (
        ("warmup_max_lr=0.5", "lr=0.02 of the optimizer"),
        ("warmup_num_steps=100", "DummyScheduler(warmup_num_steps=4), 2 steps of 2 processes"),
        ("total_num_steps=1000", "DummyScheduler(total_num_steps=21), 11 steps of 2 processes"),
    ):
        assert f"scheduler.params.{value} with {source}" in text
    trained = torch.optim.SGD(model.parameters(), lr=0.02)
    with pytest.raises(ConfigError, match=r"lr=0\.02 of the optimizer"):
        scheduled("WarmupLR", {"warmup_max_lr": 0.5}, trained)
    nobodys = DummyOptim(model.parameters())  # nobody gave its rate, nor the steps below
    assert scheduled("WarmupDecayLR", dict(params), nobodys) == params
    with pytest.raises(ConfigError, match="WarmupDecayLR without total_num_steps"):
        scheduled("WarmupDecayLR", {}, dummy)
    with pytest.raises(ConfigError, match='warmup_num_steps="auto": nothing in the run tells'):
        scheduled("WarmupLR", {"warmup_num_steps": "auto"}, dummy)


@pytest.mark.parametrize(
    ("precision", "expected"), [("bf16", None), ("fp16", "bfloat16"), ("no", "enabled=True")]
)
def test_autocast_of_the_configuration_is_that_of_the_run(
    precision: str, expected: str | None
) -> None:
    plugin = DeepSpeedPlugin({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    dims = data_parallel(2, 0)
    plan = replace(plan_of(plugin), mixed_precision=precision, parallel_dims=dims)
    settings = Settings(plugin, plan)
    settings.follow_run([4])
    assert len(settings.problems) == (expected is not None)
    assert (expected or "") in "".join(problem.value for problem in settings.problems)


def test_stand_ins_cannot_step_alone() -> None:
    dummy = DummyOptim([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(StateError, match="DummyOptim stands for"):
        dummy.step()
    with pytest.raises(StateError, match="DummyScheduler stands for"):
        DummyScheduler(dummy).step()


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
        assert (plugin.offload_optimizer_device, plugin.offload_param_device) == ("cpu", None)
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
    with patched(ACCELERATE_USE_DEEPSPEED="1", ACCELERATE_DEEPSPEED_ZERO_STAGE="many"):
        with pytest.raises(ConfigError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE='many'"):
            resolve(Arguments(cpu=True), Environment.read())
    with patched(ACCELERATE_USE_DEEPSPEED="1", ACCELERATE_GRADIENT_CLIPPING="auto"):
        plan = resolve(Arguments(cpu=True), Environment.read())
        assert active(plan.plugin("deepspeed")) is not None
        assert active(plan.plugin("deepspeed")).gradient_clipping is None
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


def test_a_plugin_is_a_node_of_a_schema() -> None:
    node = OmegaConf.merge(
        OmegaConf.structured(DeepSpeedPlugin),
        OmegaConf.create({"zero_stage": 1, "hf_ds_config": {"steps_per_print": 7}}),
    )
    plugin = OmegaConf.to_object(node)
    assert isinstance(plugin, DeepSpeedPlugin)
    assert plugin.stage == 1
    assert plugin.deepspeed_config["steps_per_print"] == 7
    assert plugin.get_value("zero_optimization.stage") == 1


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
    with pytest.raises(NotBuiltError, match="enable_msamp"):
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


def test_options_that_an_engine_ignores_are_named_together() -> None:
    handlers = [GradScalerKwargs(init_scale=2.0)]
    accumulation = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    for stage, precision, number in ((1, "fp16", 2), (2, "fp16", 1), (1, "bf16", 1), (3, "no", 0)):
        plan = plan_of(
            DeepSpeedPlugin(zero_stage=stage),
            kwargs_handlers=handlers,
            gradient_accumulation_plugin=accumulation,
        )
        found = [str(one) for one in ignored(replace(plan, mixed_precision=precision))]
        assert len(found) == number
        if precision == "fp16":
            assert found[0].startswith("GradScalerKwargs(init_scale=2.0) with deepspeed:")
    assert ignored(plan_of(DeepSpeedPlugin(), kwargs_handlers=[GradScalerKwargs()])) == []


def test_the_active_plugin_is_asked_for_where_deepspeed_is_off() -> None:
    with pytest.raises(ConfigError, match="DeepSpeed is off"):
        get_active_deepspeed_plugin(AcceleratorState(cpu=True))


def test_init_at_stage_three_is_switched_inside_a_context() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()
    assert not DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).is_zero3_init_enabled()


def test_buckets_are_as_large_as_the_model_or_under_stage_three_as_a_layer() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
    for stage, size in ((2, 360), (3, 64)):
        zero = completed(DeepSpeedPlugin(zero_stage=stage), model=model)["zero_optimization"]
        assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == size
    odd = completed(DeepSpeedPlugin(zero_stage=2), model=torch.nn.Linear(8, 1))
    assert odd["zero_optimization"]["allgather_bucket_size"] == 10
    small = completed(DeepSpeedPlugin(zero_stage=3), model=torch.nn.Linear(9, 1))
    assert small["zero_optimization"]["reduce_bucket_size"] == 10


def test_parameters_on_disk_do_rest_there_in_buffers_of_their_size(tmp_path: Path) -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=3, offload_param_device="nvme", offload_param_nvme_path=str(tmp_path)
    )
    section = completed(plugin, model=torch.nn.Linear(6, 5))["zero_optimization"]["offload_param"]
    assert (section["max_in_cpu"], section["buffer_size"], section["buffer_count"]) == (0, 15, 5)
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_param": offload}}
    section = completed(DeepSpeedPlugin(config))["zero_optimization"]["offload_param"]
    assert "buffer_size" not in section  # what a file leaves out is DeepSpeed's to decide


# -- with an engine ------------------------------------------------------------------------


def loaders_come_after_the_model() -> None:
    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(32, 6)), batch_size=size)

    for told, first in ((16, 16), (None, 8)):
        config = {"train_micro_batch_size_per_gpu": told} if told else None
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config))
        assert accelerator.state.deepspeed_plugin.zero_stage == 2
        model = torch.nn.Linear(6, 5)
        engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if told:
            with pytest.raises(ConfigError, match="per_gpu=16 with batch_size=8 of the prepared"):
                accelerator.prepare(loader(8))
        accelerator.prepare(loader(first))
        sizes = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
        assert sizes == (first, first * accelerator.num_processes)
        accelerator.prepare(loader(2))  # for evaluation
        assert engine.train_micro_batch_size_per_gpu() == first
        accelerator.end_training()
    with pytest.raises(ConfigError, match=r"DistributedDataParallelKwargs\(static_graph=True\)"):
        Accelerator(
            cpu=True,
            deepspeed_plugin=DeepSpeedPlugin(),
            kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)],
        )
    AcceleratorState._reset_state(reset_partial_state=True)


def test_an_engine_takes_the_batch_size_of_loaders_that_come_after_it() -> None:
    run_distributed(loaders_come_after_the_model, 1)
