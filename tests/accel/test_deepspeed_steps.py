"""What an engine of DeepSpeed makes of backward passes, norms, schedules and groups of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.errors import ConfigError
from accel.utils import DeepSpeedPlugin
from tests.accel.test_deepspeed import GLOBAL_BATCH, build, data, error_of, largest
from tests.helpers import run_distributed


def own(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a global batch."""
    return tensor[accelerator.process_index :: accelerator.num_processes]


def started(**fields: Any) -> tuple[Any, ...]:
    """Accelerator, model and SGD under a plugin with these fields."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(**fields))
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
    run_distributed(backward_passes, 2, timeout=110)
