"""What an engine of DeepSpeed makes of backward passes, norms, schedules and groups of a step."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch

from accel import Accelerator
from accel.errors import ConfigError
from accel.utils import DeepSpeedPlugin, DummyOptim
from tests.accel.strategies.deepspeed.test_strategy import (
    GLOBAL_BATCH,
    build,
    data,
    error_of,
    largest,
)
from tests.helpers import run_distributed


def own(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a global batch."""
    return tensor[accelerator.process_index :: accelerator.num_processes]


def started(precision: str = "no", **fields: Any) -> tuple[Any, ...]:
    """Accelerator, model and SGD under a plugin with these fields."""
    plugin = DeepSpeedPlugin(**fields)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision=precision)
    model = build()
    return (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))


# -- several backward passes of one step ---------------------------------------------------


def sums_two_backward_passes(stage: int, held: bool) -> None:
    """Two losses of different batches end in one step, the first of them held where it must."""
    accelerator, model, optimizer = started(zero_stage=stage)
    reference = build()
    inner = torch.optim.SGD(reference.parameters(), lr=0.1)
    batches = list(data(GLOBAL_BATCH, steps=4))
    for (inputs, targets), second in zip(batches[::2], batches[1::2], strict=True):
        error_of(reference(inputs), targets).backward()
        error_of(reference(second[0]), second[1]).backward()
        inner.step()
        inner.zero_grad()
        inputs, targets = own(accelerator, inputs), own(accelerator, targets)
        if held:
            with accelerator.no_sync(model):
                accelerator.backward(error_of(model(inputs), targets))
        else:
            accelerator.backward(error_of(model(inputs), targets))
        inputs, targets = (own(accelerator, tensor) for tensor in second)
        accelerator.backward(error_of(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    assert largest(accelerator.get_state_dict(model), reference.state_dict()) < 1e-6, stage
    accelerator.end_training()


def refuses_what_would_be_lost(stage: int) -> None:
    accelerator, model, optimizer = started(zero_stage=stage)
    inputs, targets = next(iter(data(4)))

    def loss() -> torch.Tensor:
        return error_of(model(inputs), targets)

    accelerator.backward(loss())
    with pytest.raises(ConfigError, match=rf"a second backward .* ZeRO {stage}.*no_sync\(model\)"):
        accelerator.backward(loss())
    optimizer.zero_grad()
    accelerator.backward(loss())
    optimizer.step()
    accelerator.backward(loss(), retain_graph=True)
    accelerator.end_training()


def refuses_a_graph_without_parameters() -> None:
    accelerator, model, _ = started(zero_stage=3)
    inputs, targets = next(iter(data(4)))
    with pytest.raises(ConfigError, match=r"retain_graph=True\) under ZeRO 3.*Sum the losses"):
        accelerator.backward(error_of(model(inputs), targets), retain_graph=True)
    accelerator.backward(error_of(model(inputs), targets), retain_graph=False)
    accelerator.end_training()


def backward_passes() -> None:
    for stage, held in ((0, False), (1, True), (2, True), (3, False)):
        sums_two_backward_passes(stage, held)
    refuses_what_would_be_lost(1)
    refuses_what_would_be_lost(2)
    refuses_a_graph_without_parameters()


def test_two_backward_passes_make_one_step_or_are_refused() -> None:
    run_distributed(backward_passes, 2)


# -- norms ---------------------------------------------------------------------------------


def tells_the_norm_in_bf16(**fields: Any) -> None:
    """The norm is that of the averaged gradients on every rank, and the step is clipped to it."""
    accelerator, model, optimizer = started("bf16", **fields)
    inputs, targets = next(iter(data(GLOBAL_BATCH)))
    reference = build()
    error_of(reference(inputs), targets).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    accelerator.backward(error_of(model(own(accelerator, inputs)), own(accelerator, targets)))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    assert norm.item() == pytest.approx(expected.item(), rel=2e-2), fields
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    optimizer.step()
    after = accelerator.get_state_dict(model)
    moved = torch.nn.utils.get_total_norm([after[name] - before[name] for name in after])
    assert moved.item() == pytest.approx(0.1 * 0.01, rel=2e-2), fields
    accelerator.end_training()


def tells_that_a_gradient_is_not_finite(stage: int, precision: str) -> None:
    accelerator, model, optimizer = started(precision, zero_stage=stage)
    inputs, targets = next(iter(data(4)))
    inputs[0, 0] = float("nan")
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.backward(error_of(model(inputs), targets))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == float("inf"), stage
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert largest(accelerator.get_state_dict(model), before) == 0.0
    accelerator.end_training()


def norms() -> None:
    for stage in range(4):
        tells_the_norm_in_bf16(zero_stage=stage)
    tells_the_norm_in_bf16(hf_ds_config={"data_types": {"grad_accum_dtype": "fp32"}}, zero_stage=1)
    tells_that_a_gradient_is_not_finite(2, "no")
    tells_that_a_gradient_is_not_finite(3, "no")
    tells_that_a_gradient_is_not_finite(3, "bf16")
    measures_the_norm_alone()


def test_norms_are_those_of_the_whole_gradient() -> None:
    run_distributed(norms, 2)


def measures_the_norm_alone() -> None:
    """An infinite bound asks for the norm; the configuration's own bound still holds."""
    accelerator, model, optimizer = started(zero_stage=1, gradient_clipping=0.01)
    inputs, targets = next(iter(data(4)))
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.backward(error_of(model(inputs), targets))
    assert accelerator.clip_grad_norm_(model.parameters(), float("inf")) > 0.02
    optimizer.step()
    after = accelerator.get_state_dict(model)
    moved = torch.nn.utils.get_total_norm([after[name] - before[name] for name in after])
    assert moved.item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    accelerator.end_training()


# -- schedules of an optimizer that the engine replaces ------------------------------------


def adagrad(model: torch.nn.Module, num_groups: int) -> torch.optim.Adagrad:
    parameters = list(model.parameters())
    groups = [parameters] if num_groups == 1 else [parameters[:2], parameters[2:]]
    return torch.optim.Adagrad([{"params": group, "lr": 0.1} for group in groups], lr=0.5)


def schedule(kind: str, optimizer: torch.optim.Optimizer, each: int) -> Any:
    """A warm-up, or a quarter of the rate after each step; a step counts `each` times."""
    schedules = torch.optim.lr_scheduler
    if kind == "warm":
        return schedules.LambdaLR(optimizer, lambda step: 0.1 * (1 + step // each))
    parts = [schedules.StepLR(optimizer, each, 0.25) for _ in range(2)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3 * each])


def steers_adagrad(stage: int, kind: str) -> None:
    """DeepSpeed builds another Adagrad: group and schedule are those of the given one."""
    reference = build()
    inner = adagrad(reference, 1)
    inner_schedule = schedule(kind, inner, 1)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = build()
    optimizer = adagrad(model, 1)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, schedule(kind, optimizer, accelerator.num_processes)
    )
    for inputs, targets in data(GLOBAL_BATCH, steps=4):
        error_of(reference(inputs), targets).backward()
        inner.step()
        inner_schedule.step()
        inner.zero_grad()
        accelerator.backward(error_of(model(own(accelerator, inputs)), own(accelerator, targets)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    found = [group["lr"] for group in optimizer.param_groups]
    assert found == pytest.approx([group["lr"] for group in inner.param_groups]), (stage, kind)
    assert largest(accelerator.get_state_dict(model), reference.state_dict()) < 1e-5, stage
    accelerator.end_training()


def refuses_adagrad_in_groups() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    model = build()
    with pytest.raises(ConfigError, match=r"Adagrad with 2 groups under ZeRO 1.*one group"):
        accelerator.prepare(model, adagrad(model, 2))
    accelerator.end_training()


def steers_what_stood_for_it_before() -> None:
    """A schedule that was built on a DummyOptim, and is prepared after it."""
    config = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config, zero_stage=1))
    model = build()
    stand_in = DummyOptim(model.parameters(), lr=0.1)
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LambdaLR(stand_in, lambda step: 0.5 ** (step + 1)) for _ in range(2)]
    scheduler = schedules.SequentialLR(stand_in, parts, milestones=[9])
    model, optimizer = accelerator.prepare(model, stand_in)
    scheduler = accelerator.prepare_scheduler(scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.05
    inputs, targets = next(iter(data(4)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler")
        accelerator.backward(error_of(model(inputs), targets))
        optimizer.step()
        scheduler.step()
    expected = 0.1 * 0.5 ** (accelerator.num_processes + 1)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == expected
    accelerator.end_training()


def refuses_a_schedule_from_another_rate() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config, zero_stage=1))
    model = build()
    stand_in = DummyOptim(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(stand_in, lambda step: 0.5**step)
    accelerator.prepare(model, stand_in)
    with pytest.raises(ConfigError, match=r"LambdaLR on DummyOptim\(lr=0.001\).*engine's is 0.2"):
        accelerator.prepare_scheduler(scheduler)
    accelerator.end_training()


def schedules() -> None:
    steers_adagrad(2, "sequential")
    steers_adagrad(3, "warm")
    refuses_adagrad_in_groups()
    steers_what_stood_for_it_before()
    refuses_a_schedule_from_another_rate()


def test_schedules_steer_the_optimizer_that_steps() -> None:
    run_distributed(schedules, 2)


# -- what a step costs ---------------------------------------------------------------------


def starts_no_program() -> None:
    """DeepSpeed by itself counts the CPU's nodes, by a program, at every reduction of ZeRO-3."""
    accelerator, model, optimizer = started(zero_stage=3)
    inputs, targets = next(iter(data(GLOBAL_BATCH, steps=1)))
    with patch("subprocess.Popen", side_effect=AssertionError("a program is started")):
        accelerator.backward(error_of(model(inputs), targets))
        optimizer.step()
    from deepspeed.accelerator import get_accelerator

    assert get_accelerator().device_count() == accelerator.num_processes  # all on one node
    accelerator.end_training()


def test_a_step_starts_no_program() -> None:
    run_distributed(starts_no_program, 2)


def scales_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def scales_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def scales_gathered(model: torch.nn.Module) -> None:
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        if torch.distributed.get_rank() == 0:
            for parameter in parameters:
                parameter.mul_(0.5)


def sets_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def loads(model: torch.nn.Module) -> None:
    state = {name: value * 0.5 for name, value in accelerator_state(model).items()}
    model.accel_test.strategy.state.load_model_state(model, state)


def accelerator_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.accel_test.get_state_dict(model))


def told_of_changes(stage: int, precision: str, change: Any, steps: int = 3) -> list[str]:
    accelerator, model, optimizer = started(precision, zero_stage=stage)
    model.accel_test = accelerator
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs, targets in data(GLOBAL_BATCH, steps=steps):
            inputs, targets = own(accelerator, inputs), own(accelerator, targets)
            accelerator.backward(error_of(model(inputs), targets))
            if change is not None:
                change(model)
            optimizer.step()
            optimizer.zero_grad()
    del model.accel_test
    accelerator.end_training()
    return [str(w.message) for w in caught if "under DeepSpeed's ZeRO" in str(w.message)]


def changes_by_hand() -> None:
    for stage, precision in ((1, "no"), (2, "bf16"), (0, "bf16")):
        for change in (scales_in_place, scales_data):
            told = told_of_changes(stage, precision, change)
            assert len(told) == 1, (stage, precision, change)
            assert "weights that were changed by hand since the last step" in told[0]
        for change in (None, loads):
            assert told_of_changes(stage, precision, change) == [], (stage, precision, change)
    (told_once,) = told_of_changes(2, "no", sets_gradients)
    assert "gradients that were set in parameter.grad" in told_once
    assert told_of_changes(0, "no", scales_in_place) == []  # which hold
    for precision in ("no", "bf16"):  # of stage 3, whose parameters are place holders
        for change in (None, loads):
            assert told_of_changes(3, precision, change) == [], (precision, change)
        assert len(told_of_changes(3, precision, scales_in_place)) == 1, precision
    assert told_of_changes(3, "no", scales_gathered) == []  # which holds
    assert len(told_of_changes(3, "bf16", scales_gathered)) == (int(os.environ["RANK"]) == 0)


def test_changes_by_hand_that_a_step_overwrites_are_told_of() -> None:
    run_distributed(changes_by_hand, 2)
