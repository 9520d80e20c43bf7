"""DeepSpeed's configuration: filled from the run, and every contradiction told in one error.

Holds E5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.training import GradientAccumulationPlugin
from accel.machine.errors import ConfigError
from accel.plan.dims import data_parallel
from accel.strategies.deepspeed.settings import Settings
from accel.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler
from tests.accel.strategies.deepspeed.helpers import completed, plan_of


def told_by(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(error.value)


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
        "warmup_num_steps": 4,
        "total_num_steps": 21,
    }
    zero = found["zero_optimization"]
    assert zero["reduce_bucket_size"] == 36
    assert zero["stage3_prefetch_bucket_size"] == 32
    assert zero["stage3_param_persistence_threshold"] == 60
    assert config["train_batch_size"] == auto  # the caller's own is left alone


@pytest.mark.parametrize("steps", [None, 1, 2, 3])
def test_a_caller_that_accumulates_itself_has_the_steps_of_the_configuration(
    steps: int | None,
) -> None:
    plugin = DeepSpeedPlugin({"gradient_accumulation_steps": 2, "train_batch_size": 16})
    given = {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=steps)}
    if steps == 3:
        with pytest.raises(ConfigError, match=r"steps=2 with Accelerator.*steps=3"):
            completed(plugin, [4], **given)
        return
    assert completed(plugin, [4], **given)["gradient_accumulation_steps"] == 2
    assert plan_of(plugin, **given).accumulation.num_steps == 2


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
    found = completed(DeepSpeedPlugin({"optimizer": {"type": "RAdam"}}), None, model, dummy)
    expected = {"lr": 0.05, "weight_decay": 0, "betas": (0.5, 0.6)}
    assert found["optimizer"]["params"] == expected
    params = {"lr": 0.01, "weight_decay": 0.3, "betas": [0.5, 0.6]}
    config = {"optimizer": {"type": "RAdam", "params": params}}
    with pytest.raises(ConfigError) as error:
        completed(DeepSpeedPlugin(config), None, model, dummy)
    assert "optimizer.params.lr=0.01 with DummyOptim(lr=0.05)" in told_by(error)
    assert len(error.value.problems) == 1

    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    dummy = DummyOptim(groups)
    assert completed(DeepSpeedPlugin(config), None, model, dummy)["optimizer"]["params"] == params
    assert [sorted(group) for group in dummy.params] == [["lr", "params"], ["params"]]


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
        "warmup_num_steps": 4,
    }
    assert scheduled("WarmupDecayLR", {"warmup_num_steps": 4}, dummy, **steps) == {
        "warmup_max_lr": 0.02,
        "warmup_num_steps": 4,
        "total_num_steps": 21,
    }
    cosine = scheduled("WarmupCosineLR", {"cos_min_ratio": 0.1}, dummy, **steps)
    assert cosine == {"cos_min_ratio": 0.1, "warmup_num_steps": 4, "total_num_steps": 21}
    linear = scheduled("WarmupLR", {}, dummy, warmup_num_steps=4, warmup_type="linear")
    assert linear == {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}
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
        ("warmup_num_steps=100", "DummyScheduler(warmup_num_steps=4)"),
        ("total_num_steps=1000", "DummyScheduler(total_num_steps=21)"),
    ):
        assert f"scheduler.params.{value} with {source}" in text
    trained = torch.optim.SGD(model.parameters(), lr=0.02)
    with pytest.raises(ConfigError, match=r"lr=0\.02 of the optimizer"):
        scheduled("WarmupLR", {"warmup_max_lr": 0.5}, trained)
    nobodys = DummyOptim(model.parameters())  # nobody gave its rate, nor the steps below
    assert scheduled("WarmupDecayLR", dict(params), nobodys) == params
    with pytest.raises(ConfigError, match="WarmupDecayLR without total_num_steps"):
        scheduled("WarmupDecayLR", {}, dummy)
    with pytest.raises(ConfigError, match='total_num_steps="auto": it cannot be resolved'):
        scheduled("WarmupDecayLR", {"total_num_steps": "auto"}, dummy)


def test_values_that_are_auto_and_that_nobody_gives() -> None:
    """E1: "auto" is a norm of 1.0, and the warm-up of a `DummyScheduler`'s default."""
    auto = {"gradient_clipping": "auto"}
    assert completed(DeepSpeedPlugin(auto))["gradient_clipping"] == 1.0
    assert completed(DeepSpeedPlugin(auto, gradient_clipping=0.3))["gradient_clipping"] == 0.3
    assert completed(DeepSpeedPlugin())["gradient_clipping"] == 0.0
    dummy = DummyOptim(torch.nn.Linear(6, 5).parameters(), lr=0.02)
    found = scheduled("WarmupLR", {"warmup_num_steps": "auto"}, dummy)
    assert found["warmup_num_steps"] == 1  # DeepSpeed refuses 0


# -- with an engine ------------------------------------------------------------------------


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
    settings.resolve_run([4])
    assert len(settings.problems) == (expected is not None)
    assert (expected or "") in "".join(problem.value for problem in settings.problems)
