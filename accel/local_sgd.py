"""Local SGD: processes train on their own and average their weights every few steps.

Source: https://arxiv.org/abs/1805.09767
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import torch

from accel.comm.ops import reduce
from accel.machine.errors import ConfigError

if TYPE_CHECKING:
    from accel.accelerator import Accelerator


class LocalSGD:
    """A context in which no gradients are exchanged, and weights are averaged every few steps.

    Averaged are the trainable parameters, at every `local_sgd_steps`-th call of `step` and at the
    end of the context. Every process makes as many calls.

    Args:
        accelerator: of the run: one process, or DistributedDataParallel.
        model: what `prepare` returned for it.
        local_sgd_steps: calls of `step` from one average to the next.
        enabled: whether it does anything; gradients are else averaged at every step.

    Raises:
        ConfigError: if ranks do not hold the full model, `model` is not prepared, or
            `local_sgd_steps` is no whole number, at least 1.

    Example:
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for inputs, targets in loader:
        ...         with accelerator.accumulate(model):
        ...             accelerator.backward(loss_function(model(inputs), targets))
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             local_sgd.step()

    Source: https://huggingface.co/docs/accelerate/usage_guides/local_sgd
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            rule, remedy = "it is a whole number, at least 1", "Give local_sgd_steps=8, say."
            raise ConfigError.of(f"local_sgd_steps={local_sgd_steps!r}", rule, remedy)
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._contexts = ExitStack()
        if self.enabled:
            self._check()

    def _check(self) -> None:
        strategy, spec = self.accelerator.strategy, self.accelerator.strategy.spec
        owned = spec.owns_accumulation or spec.owns_parameters
        plain = all(type(p.data) is torch.Tensor for p in self.model.parameters())
        if strategy.state.sharded or owned or not plain:
            raise ConfigError.of(
                f"LocalSGD with {self.accelerator.plan.strategy}",
                "each process has to hold and update the full model",
                "Train with DistributedDataParallel (no plugin), or give enabled=False.",
            )
        if not any(self.model is prepared for prepared in self.accelerator._models):
            raise ConfigError.of(
                f"LocalSGD with a {type(self.model).__name__} that was not prepared",
                "the prepared model exchanges gradients until its no_sync is entered",
                "Give the model that accelerator.prepare(model) returned.",
            )

    def __enter__(self) -> Self:
        if self.enabled:
            self._contexts.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._contexts.close()
        if self.enabled and kind is None:  # after an error other ranks may not get here
            self._average()

    def step(self) -> None:
        """Count a step, and average the weights if it is time to."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        own = [p for p in self.model.parameters() if p.requires_grad]
        for parameter, mean in zip(own, reduce([p.data for p in own], "mean"), strict=True):
            parameter.copy_(mean)
