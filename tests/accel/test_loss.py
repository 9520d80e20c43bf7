"""The one normalisation: N accumulated micro-batches on one process are one on each of N."""

from __future__ import annotations

import pytest
import torch

from accel import Accelerator
from accel.comm.local import LocalCommunicator
from accel.loss import global_weight, normalize_loss
from tests.helpers import run_distributed

# Ragged on purpose: samples of a step, by micro-batch.
SIZES = (3, 1, 4, 2)


def micro_batches() -> list[torch.Tensor]:
    return list(torch.linspace(-1.0, 1.0, sum(SIZES) * 2).view(-1, 2).split(SIZES))


def exact_gradient() -> torch.Tensor:
    """Return the gradient of the mean of squares over all samples, from one backward pass."""
    weight = torch.ones(2, requires_grad=True)
    ((torch.cat(micro_batches()) @ weight) ** 2).mean().backward()
    return weight.grad


def step_gradient(weigh: str) -> torch.Tensor:
    """Return the gradient of a step whose micro-batches are shared out to the processes."""
    accelerator = Accelerator(cpu=True)
    mine = micro_batches()[accelerator.process_index :: accelerator.num_processes]
    accelerator.gradient_accumulation_steps = len(mine)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model = accelerator.prepare(model)
    if weigh == "known":
        weights: list[torch.Tensor | int] = list(SIZES)
    else:
        weights = [torch.ones(len(batch)) for batch in mine]
    total_weight = global_weight(weights, accelerator.comm)
    for index, batch in enumerate(mine):
        with accelerator.accumulate(model, sync_gradients=index == len(mine) - 1):
            loss = normalize_loss(
                (model(batch) ** 2).sum(),
                total_weight,
                num_processes=accelerator.num_processes,
                num_steps=accelerator.gradient_accumulation_steps,
            )
            accelerator.backward(loss)
    return accelerator.unwrap_model(model).weight.grad.flatten()


@pytest.mark.parametrize("weigh", ["known", "local"])
def test_one_process_accumulates_the_exact_gradient(weigh: str) -> None:
    torch.testing.assert_close(step_gradient(weigh), exact_gradient())


@pytest.mark.parametrize("weigh", ["known", "local"])
def test_two_processes_make_the_same_gradient(weigh: str) -> None:
    for gradient in run_distributed(step_gradient, 2, weigh):
        torch.testing.assert_close(gradient, exact_gradient())


def test_known_weights_need_no_exchange() -> None:
    assert global_weight([3, 4], LocalCommunicator()) == 7
    assert global_weight([], LocalCommunicator()) == 0


def test_weights_of_both_kinds_are_summed() -> None:
    total = global_weight([3, torch.tensor([1.0, 2.0]), torch.tensor(4)], LocalCommunicator())
    assert isinstance(total, torch.Tensor)
    assert total.item() == 10


def test_a_plain_number_is_normalised_too() -> None:
    assert normalize_loss(6.0, 3, num_processes=2, num_steps=4) == 16.0
