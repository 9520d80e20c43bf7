"""Several backward passes of one step, and norms of gradients, under DeepSpeed (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.errors import ConfigError
from tests.accel.strategies.deepspeed.helpers import (
    GLOBAL_BATCH,
    build,
    data,
    error_of,
    largest,
    own,
    started,
)
from tests.helpers import run_distributed


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


# -- norms -----------------------------------------------------------------------------------


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


# -- the cost of a step ----------------------------------------------------------------------


def divides_what_is_not_divided() -> None:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(zero_stage=0)
    )
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for options in ({}, {"scale_wrt_gas": False}):
        accelerator.backward(model(torch.ones(4, 3)).sum(), **options)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.zero_grad()
    assert norms[1] == pytest.approx(2 * norms[0])
    assert norms[0] > 0
    accelerator.end_training()


def test_a_loss_that_its_caller_scaled_is_not_divided() -> None:
    run_distributed(divides_what_is_not_divided, 2)
