"""A user's own step, by the one function and by hand: the step of a plain loop over all samples.

Holds R1, X1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import runner
from accel import Accelerator, TorchTensorParallelPlugin
from runner import MicroBatch, Step, Window
from runner.recipe.schema import Trainer
from tests.helpers import run_distributed

Tensors = Mapping[str, torch.Tensor]
NUM_SAMPLES, LR, MAX_NORM = 10, 0.1, 0.05


class Own(Step):
    """Squared errors, weighted by the tokens of a sample where there are any."""

    def __init__(self, weighted: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.weighted = weighted
        self.models = {"model": model}
        self.optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=LR)}

    def losses(self, batch: Any) -> torch.Tensor:
        return (self.models["model"](batch[0]).squeeze(1) - batch[1]).square()

    def weights(self, batch: Any) -> torch.Tensor | None:
        return batch[2] if self.weighted else None

    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, torch.Tensor]:
        model, optimizer = self.models["model"], self.optimizers["optimizer"]

        def losses(_: torch.nn.Module, batch: Any) -> torch.Tensor:
            return self.losses(batch)

        return runner.optimizer_step(
            accelerator, window, trainer, model, optimizer, losses, self.weights
        )

    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"loss": self.losses(batch)}

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {"loss": values["loss"].mean().item()}


class ByHand(Own):
    """The same with `accelerator.backward`, as `Step` documents it."""

    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, torch.Tensor]:
        model, optimizer = self.models["model"], self.optimizers["optimizer"]
        weight: Any = window.num_samples
        if self.weighted:
            kept = [runner.keep_valid(m.batch[2], m.valid) for m in window.micro_batches]
            weight = runner.global_weight(kept, accelerator)
        share, norms = 0.0, {}
        for index, micro_batch in enumerate(window.micro_batches):
            last = index == len(window.micro_batches) - 1
            with accelerator.accumulate(model, sync_gradients=last):
                total = runner.keep_valid(self.losses(micro_batch.batch), micro_batch.valid).sum()
                loss = runner.normalize_loss(
                    total,
                    weight,
                    grad_size=accelerator.parallel_dims.grad_size,
                    num_steps=accelerator.gradient_accumulation_steps,
                )
                accelerator.backward(loss)
                share += total.detach() / weight / accelerator.parallel_dims.tp
                if last:
                    norms = runner.clip_gradients(accelerator, model, trainer)
                    optimizer.step()
                    optimizer.zero_grad()
        return {"loss": share, **norms}


def samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(NUM_SAMPLES, 3, generator=generator),
        torch.randn(NUM_SAMPLES, generator=generator),
        torch.randint(1, 9, (NUM_SAMPLES,), generator=generator),
    )


def window() -> Window:
    """Return the samples as micro-batches of 4, the last padded with what would ruin the loss."""
    micro_batches = []
    for start in range(0, NUM_SAMPLES, 4):
        real = min(4, NUM_SAMPLES - start)
        padded = [
            torch.cat([t[start : start + real], torch.full_like(t[: 4 - real], 1000)])
            for t in samples()
        ]
        micro_batches.append(MicroBatch(padded, None if real == 4 else torch.arange(4) < real))
    return Window(micro_batches, NUM_SAMPLES)


def made(kind: type[Own], weighted: bool, tp_size: int) -> tuple[dict[str, float], Tensors]:
    """Return the values that a step logs, summed over processes, and the weights after it."""
    plan = {"0": "colwise", "2": "rowwise"}
    plugin = TorchTensorParallelPlugin(tp_size, tp_plan=plan) if tp_size > 1 else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, torch_tp_plugin=plugin)
    step = kind(weighted)
    model, optimizer = accelerator.prepare(step.models["model"], step.optimizers["optimizer"])
    step.models, step.optimizers = {"model": model}, {"optimizer": optimizer}
    values = step.train(accelerator, window(), Trainer(clip_grad_norm=MAX_NORM))
    assert all(parameter.grad is None for parameter in model.parameters())
    summed = {name: accelerator.reduce(value).item() for name, value in values.items()}
    return summed, accelerator.get_state_dict(model)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [Own, ByHand])
def test_an_own_step_is_that_of_a_plain_loop(kind: type[Own], weighted: bool, tp_size: int) -> None:
    plain = Own(weighted)
    batch = samples()
    loss = plain.losses(batch).sum() / (batch[2].sum() if weighted else NUM_SAMPLES)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.models["model"].parameters(), MAX_NORM)
    plain.optimizers["optimizer"].step()
    for values, weights in run_distributed(made, tp_size, kind, weighted, tp_size):
        assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert values["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        for name, weight in plain.models["model"].state_dict().items():
            torch.testing.assert_close(weights[name], weight)
