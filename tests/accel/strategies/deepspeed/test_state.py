"""State dicts under DeepSpeed: full tensors by name, for any stage and world size (R5, E1)."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler
from tests.accel.strategies.deepspeed.helpers import (
    build,
    data,
    error_of,
    largest,
    plain,
    started,
    started_with_schedule,
    train,
)
from tests.helpers import run_distributed


def runs(start: int, stop: int, source: str | None, target: str | None, **fields: Any) -> Any:
    """Steps `start` to `stop` of a run that loads `source` and saves `target`."""
    options = {"mixed_precision": fields.pop("precision")} if "precision" in fields else {}
    plugin = DeepSpeedPlugin(**fields) if fields else None
    accelerator, model, optimizer, scheduler, loader = started_with_schedule(plugin, **options)
    if source is not None:
        if plugin is not None:  # what is loaded is neither the first state nor an empty one
            batch = next(iter(data(4)))
            train(accelerator, model, optimizer, scheduler, [batch])
        accelerator.load_state(source)
    batches = list(loader)[start:stop]
    losses = train(accelerator, model, optimizer, scheduler, batches)
    if target is not None:
        accelerator.save_state(target)
    weights, rate = accelerator.get_state_dict(model), scheduler.get_last_lr()[0]
    assert optimizer.param_groups[0]["lr"] == rate
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    accelerator.end_training()
    return losses, weights, rate


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_state_leaves_zero_3_for_one_process_and_comes_back(
    tmp_path: Path, precision: str
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    losses, weights, rate = run_distributed(plain, 1, None, 3)[0]
    tolerance = 1e-5 if precision == "no" else 1e-2
    begun = run_distributed(begins, 2, first, precision)[0]
    middle, _, _ = run_distributed(runs, 1, 4, 7, first, second)[0]
    ended, found, found_rate = run_distributed(ends, 2, second, precision)[0]
    together = [*begun, *middle, *ended]
    assert max(abs(a - b) for a, b in zip(together, losses, strict=True)) < tolerance
    assert largest(found, weights) < tolerance
    assert found_rate == rate < 0.001


def begins(target: str, precision: str) -> Any:
    return runs(0, 4, None, target, zero_stage=3, precision=precision)[0]


def ends(source: str, precision: str) -> Any:
    """Go on under stages 3 and 1, which must agree; return the former."""
    other = runs(7, 10, source, None, zero_stage=1, precision=precision)
    result = runs(7, 10, source, None, zero_stage=3, precision=precision)
    tolerance = 1e-6 if precision == "no" else 1e-3
    assert largest(other[1], result[1]) < tolerance
    stage_0 = runs(7, 10, source, None, zero_stage=0, precision=precision)
    assert largest(stage_0[1], result[1]) < tolerance
    return result


# -- full tensors, loss scale, placeholders --------------------------------------------------


def returns_whole_tensors_by_the_wrappers_names() -> None:
    accelerator, model, _ = started(zero_stage=3)
    state = accelerator.get_state_dict(model, unwrap=False)
    expected = {f"module.{name}": value for name, value in build().state_dict().items()}
    assert state.keys() == model.state_dict().keys()
    assert largest(state, expected) == 0.0
    accelerator.end_training()


def resumes_the_loss_scale(folder: str) -> None:
    """fp16 does not run on the host: its scaler is put into an engine of another precision."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig

    from accel.strategies.deepspeed.state import load_scale_state, scale_state

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


def resumes(folder: str) -> None:
    returns_whole_tensors_by_the_wrappers_names()
    resumes_the_loss_scale(f"{folder}/scale")
    resumes_what_the_configuration_describes(f"{folder}/described")
    saves_a_model_that_is_only_evaluated(f"{folder}/evaluated")


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
        return float(model.optimizer.loss_scale)

    batches = list(loader)
    scale = scale_after(batches[:5])
    assert scale > 2.0**4
    accelerator.save_state(folder)
    expected = scale_after(batches[5:9])
    assert expected > scale
    accelerator.load_state(folder)
    assert model.optimizer.loss_scale == scale
    assert scale_after(batches[5:9]) == expected
    accelerator.end_training()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fp16_resumes_its_scale(tmp_path: Path, stage: int) -> None:
    run_distributed(resumes_the_loss_scale_on_the_device, 1, str(tmp_path), stage)
