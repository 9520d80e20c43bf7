"""The defaults of a strategy: the seam of a step, and capabilities right for one process.

Holds E5, X1.
"""

from __future__ import annotations

import pytest
import torch

from accel import Accelerator
from tests.helpers import run_distributed

NUM_MICRO_BATCHES = 3


def batches(rank: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(NUM_MICRO_BATCHES)]


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def gradients_of_a_window() -> tuple[list[torch.Tensor], list[float], list[bool]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICRO_BATCHES)
    model = accelerator.prepare(model_of())
    syncs: list[bool] = []

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        syncs.append(accelerator.sync_gradients)
        return loss_of(model, batch)

    losses = accelerator.forward_backward(model, batches(accelerator.process_index), loss)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    accelerator.end_training()
    return found, [value.item() for value in losses], syncs


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_window_is_that_of_a_plain_loop(world_size: int) -> None:
    plain = model_of()
    for rank in range(world_size):
        for batch in batches(rank):
            (loss_of(plain, batch) / NUM_MICRO_BATCHES / world_size).backward()
    for rank, (found, losses, syncs) in enumerate(
        run_distributed(gradients_of_a_window, world_size)
    ):
        assert syncs == [False, False, True]
        assert losses == pytest.approx([loss_of(plain, b).item() for b in batches(rank)])
        for ours, theirs in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad)


@pytest.mark.parametrize("count", [0, 1])
def test_the_window_ends_whatever_the_strategy_does(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(model_of())
    if count:  # a strategy that calls no `accumulate`
        monkeypatch.setattr(accelerator.strategy, "forward_backward", lambda *_: [])
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients
    accelerator.forward_backward(model, batches()[:count], loss_of)
    assert (accelerator.sync_gradients, accelerator.step) == (True, 0)
