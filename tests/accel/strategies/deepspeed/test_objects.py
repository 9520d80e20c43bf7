"""Which models, parts of models and groups an engine of DeepSpeed takes, and what it saves."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.errors import ConfigError
from accel.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from tests.accel.strategies.deepspeed.test_steps import own, started
from tests.accel.strategies.deepspeed.test_strategy import (
    GLOBAL_BATCH,
    build,
    data,
    error_of,
    largest,
)
from tests.helpers import run_distributed

# -- what is left behind ---------------------------------------------------------------------


def check_that_later_models_compute_with_torch() -> None:
    linear = torch.nn.functional.linear
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    model, reference = build(), build()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.nn.functional.linear is not linear  # the one that keeps less in memory
    inputs = torch.ones(GLOBAL_BATCH, 5)
    torch.testing.assert_close(model(inputs), reference(inputs))
    accelerator.end_training()
    assert torch.nn.functional.linear is linear


def test_models_after_zero_3_compute_with_torchs_own_functions() -> None:
    run_distributed(check_that_later_models_compute_with_torch, 1)


# -- experts -------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    """Two experts, of which a process sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(5, 3) for _ in range(2)])
        self.chosen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.experts[self.chosen](inputs)


class Nested(torch.nn.Module):
    """Experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe = torch.nn.Linear(5, 5), Experts()
        self.last = torch.nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(torch.tanh(self.first(inputs))))


def trains_other_experts_on_each_rank() -> None:
    """Without the leaf, ranks would wait for parameters that the others do not fetch."""
    plugin = DeepSpeedPlugin(
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        transformer_moe_cls_names="Experts",
    )
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model, reference = Nested(), Nested()
    model.moe.chosen = accelerator.process_index
    inner = torch.optim.SGD(reference.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.module.moe._z3_leaf
    for inputs, targets in data(GLOBAL_BATCH, steps=3):
        for rank in range(2):
            reference.moe.chosen = rank
            (error_of(reference(inputs[rank::2]), targets[rank::2]) / 2).backward()
        inner.step()
        inner.zero_grad()
        accelerator.backward(error_of(model(own(accelerator, inputs)), own(accelerator, targets)))
        optimizer.step()
        optimizer.zero_grad()
    assert largest(accelerator.get_state_dict(model), reference.state_dict()) < 1e-6
    accelerator.end_training()


def refuses_the_model_itself_as_a_leaf() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Nested")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = Nested()
    with pytest.raises(
        ConfigError, match=r"Nested is the whole model.*Name the classes of its layers"
    ):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.end_training()


# -- models after one another --------------------------------------------------------------


def trains_another_model_after_freeing(stage: int) -> None:
    """`free_memory` lets go of a model whose names still live."""
    accelerator, first, first_optimizer = started(zero_stage=stage)
    inputs, targets = next(iter(data(4)))
    accelerator.backward(error_of(first(inputs), targets))
    first_optimizer.step()
    expected = {name: value.clone() for name, value in accelerator.get_state_dict(first).items()}
    accelerator.free_memory()
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(error_of(model(inputs), targets))
    optimizer.step()
    assert largest(accelerator.get_state_dict(model), expected) < 1e-7
    third = build()
    with pytest.raises(ConfigError, match="a second model with one plugin"):
        accelerator.prepare(third, torch.optim.SGD(third.parameters(), lr=0.1))
    accelerator.end_training()


def refuses_a_second_accelerator_with_the_plugin() -> None:
    accelerator, model, _ = started(zero_stage=3)
    second, other = Accelerator(cpu=True), build()
    with pytest.raises(ConfigError, match="a second model with one plugin"):
        second.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert model is not None
    accelerator.end_training()
    accelerator, model, _ = started(zero_stage=3)  # the next run is free to
    accelerator.end_training()


# -- groups and names ----------------------------------------------------------------------


def refuses_a_frozen_group() -> None:
    for stage, refused in ((1, True), (2, True), (3, False)):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        model = build()
        model[0].requires_grad_(False)
        groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if refused:
            with pytest.raises(
                ConfigError, match=r"group 0 of the optimizer.*are all frozen.*Leave"
            ):
                accelerator.prepare(model, optimizer)
        else:
            accelerator.prepare(model, optimizer)
        accelerator.end_training()


def returns_whole_tensors_by_the_wrappers_names() -> None:
    accelerator, model, _ = started(zero_stage=3)
    state = accelerator.get_state_dict(model, unwrap=False)
    expected = {f"module.{name}": value for name, value in build().state_dict().items()}
    assert state.keys() == model.state_dict().keys()
    assert largest(state, expected) == 0.0
    accelerator.end_training()


# -- models that are built in parts --------------------------------------------------------


class Initialised(torch.nn.Module):
    """A model that writes to its layer's weights once that is built."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 5)
        write(self.layer.weight)


def assigns(weight: torch.Tensor) -> None:
    weight.data[:] = 7.0


def scales(weight: torch.Tensor) -> None:
    weight.data *= 7.0


def refuses_writes_to_what_is_cut() -> None:
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    )
    writes = {
        "fill_": lambda weight: weight.data.fill_(7.0),
        "normal_": lambda weight: torch.nn.init.normal_(weight.data),
        "zero_": lambda weight: weight.detach().zero_(),
        "__setitem__": assigns,
        "mul_": scales,
    }
    with accelerator.strategy.init_context():
        for name, write in writes.items():
            with pytest.raises(ConfigError, match=rf"{name} on a parameter of shape \(5, 5\)"):
                Initialised(write)
        read = Initialised(lambda weight: weight.data.float())
    assert hasattr(read.layer.weight, "ds_id")
    accelerator.end_training()


# -- what is saved -------------------------------------------------------------------------


def resumes_the_loss_scale(folder: str) -> None:
    """fp16 does not run on the host: its scaler is put into an engine of another precision."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig

    from accel.strategies.deepspeed.loss_scale import load_scale_state, scale_state

    accelerator, model, _ = started(zero_stage=1)

    def dynamic() -> Any:
        model.optimizer.dynamic_loss_scale = True
        model.optimizer.loss_scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False)
        return model.optimizer.loss_scaler

    before = dynamic()
    for overflow in (False, True, True, True):
        before.update_scale(overflow)
    accelerator.save_state(folder)
    fresh = dynamic()
    accelerator.load_state(folder)
    assert vars(fresh) == vars(before)
    assert fresh.cur_scale == 2.0**14
    accelerator.end_training()
    configs = [LossScaleConfig(torch.float16, True, 1.0, None) for _ in range(2)]  # stage 0
    configs[0].cur_scale, configs[0].cur_iter, configs[0].last_overflow_iter = 8.0, 5, 3
    saving, loading = (
        SimpleNamespace(optimizer=SimpleNamespace(loss_scale_config=c)) for c in configs
    )
    load_scale_state(loading, scale_state(saving))
    assert vars(configs[1]) == vars(configs[0])
    constant = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=None))
    assert scale_state(constant) == {}


def resumes_what_the_configuration_describes(folder: str) -> None:
    auto = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    auto["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(auto, zero_stage=2))
    model = build()
    optimizer = DummyOptim(model.parameters(), lr=0.02)
    scheduler = DummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=4)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def trained(batches: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
        for inputs, targets in batches:
            accelerator.backward(error_of(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return {name: value.clone() for name, value in state.items()}, scheduler.get_last_lr()

    batches = list(data(4))
    trained(batches[:4])
    accelerator.save_state(folder)
    expected, rate = trained(batches[4:7])
    accelerator.load_state(folder)
    found, found_rate = trained(batches[4:7])
    assert largest(found, expected) == 0.0
    assert found_rate == rate
    accelerator.end_training()


def saves_a_model_that_is_only_evaluated(folder: str) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    whole = build()
    model = accelerator.prepare(copy.deepcopy(whole))
    inputs, _ = next(iter(data(4)))
    accelerator.save_state(folder)
    with accelerator.strategy.package.zero.GatheredParameters([model.module[0].weight], 0):
        model.module[0].weight.data.zero_()
    accelerator.load_state(folder)
    assert largest(accelerator.get_state_dict(model), whole.state_dict()) == 0.0
    with torch.no_grad():
        assert torch.allclose(model(inputs), whole(inputs))
    accelerator.end_training()


def takes_models() -> None:
    trains_other_experts_on_each_rank()
    refuses_the_model_itself_as_a_leaf()
    trains_another_model_after_freeing(1)
    refuses_a_second_accelerator_with_the_plugin()


def takes_parts() -> None:
    refuses_a_frozen_group()
    returns_whole_tensors_by_the_wrappers_names()
    refuses_writes_to_what_is_cut()


def resumes(folder: str) -> None:
    resumes_the_loss_scale(f"{folder}/scale")
    resumes_what_the_configuration_describes(f"{folder}/described")
    saves_a_model_that_is_only_evaluated(f"{folder}/evaluated")


def test_models_are_one_for_each_plugin_and_experts_are_leaves() -> None:
    run_distributed(takes_models, 2)


def test_groups_names_and_models_in_parts() -> None:
    run_distributed(takes_parts, 2)


def test_what_is_saved_is_resumed(tmp_path: Path) -> None:
    run_distributed(resumes, 2, str(tmp_path))


def resumes_the_loss_scale_on_the_device(folder: str, stage: int) -> None:
    config = {"fp16": {"initial_scale_power": 4, "loss_scale_window": 2}}
    plugin = DeepSpeedPlugin(config, zero_stage=stage)
    accelerator = Accelerator(mixed_precision="fp16", deepspeed_plugin=plugin)
    model = build()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), data(4)
    )

    def scale_after(batches: Any) -> float:
        for inputs, targets in batches:
            accelerator.backward(error_of(model(inputs), targets))
            optimizer.step()
        return float(model.optimizer.cur_scale)

    batches = list(loader)
    scale = scale_after(batches[:5])
    assert scale > 2.0**4
    accelerator.save_state(folder)
    expected = scale_after(batches[5:9])
    assert expected > scale
    accelerator.load_state(folder)
    assert model.optimizer.cur_scale == scale
    assert scale_after(batches[5:9]) == expected
    accelerator.end_training()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fp16_resumes_its_scale(tmp_path: Path, stage: int) -> None:
    run_distributed(resumes_the_loss_scale_on_the_device, 1, str(tmp_path), stage)
