"""One optimizer step over a window of micro-batches, for the steps of the runner and of users."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accel.run.loss_normalization import global_weight, normalize_loss

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.data.batches import MicroBatch, Window
    from runner.recipe.schema import Trainer


def optimizer_step(
    accelerator: Accelerator,
    window: Window,
    trainer: Trainer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Callable[[torch.nn.Module, Any], torch.Tensor],
    weights: Callable[[Any], torch.Tensor | None] | None = None,
) -> dict[str, torch.Tensor]:
    """Accumulate the gradients of a window, clip them and make one step of one optimizer.

    The gradient is that of the summed loss over the summed weight of the whole window, over all
    processes, however the samples are divided into micro-batches and ranks. Padding samples count
    nothing. Precision, loss scaling and gradient synchronisation are the engine's.

    Shapes: B samples in a batch of this process.

    Args:
        accelerator: the engine.
        window: the micro-batches of the step.
        trainer: of the recipe; says how gradients are clipped.
        model: prepared; the one that is trained.
        optimizer: prepared; its parameters are the model's.
        losses: from `model` and a batch to the loss of each sample, summed over what it consists
            of: [B].
        weights: from a batch on the host to the weight of each sample, for instance its number of
            tokens: [B]; or to None: each sample weighs 1, as without `weights`.

    Returns:
        0-d tensors on the device: `loss`, and `grad_norm` (before clipping) where gradients are
        clipped by norm; this process's shares, so that the sums over processes are the values, as
        `Step.train` returns them.

    Example:
        >>> class Classify(Step):
        ...     def train(self, accelerator, window, trainer):
        ...         model, optimizer = self.models["model"], self.optimizers["optimizer"]
        ...         def losses(model, batch):
        ...             return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        ...         return optimizer_step(accelerator, window, trainer, model, optimizer, losses)
    """
    weight = _weight_of(window, weights, accelerator)
    dims = accelerator.parallel_dims
    scale = {"grad_size": dims.grad_size, "num_steps": accelerator.gradient_accumulation_steps}
    totals: list[torch.Tensor] = []

    def normalized(model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        total = keep_valid(losses(model, micro_batch.batch), micro_batch.valid).sum()
        totals.append(total.detach())
        return normalize_loss(total, weight, **scale)

    accelerator.forward_backward(model, window.on_host, normalized)
    values = clip_gradients(accelerator, model, trainer)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": _sum(totals, accelerator) / weight / dims.num_copies, **values}


def _sum(totals: list[torch.Tensor], accelerator: Accelerator) -> torch.Tensor:
    """Return the sum of 0-d tensors; 0 for none, as on a pipeline stage that computes no loss."""
    if not totals:
        return torch.zeros((), device=accelerator.device)
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()


def _weight_of(
    window: Window, weights: Callable[[Any], torch.Tensor | None] | None, accelerator: Accelerator
) -> torch.Tensor | int:
    """Return the weight of the window over all processes, never zero."""
    sums: list[torch.Tensor | int] = []
    for micro_batch in window.on_host:
        of_samples = None if weights is None else weights(micro_batch.batch)
        if of_samples is None:
            return window.num_samples
        total = keep_valid(of_samples, micro_batch.valid).sum()
        sums.append(total.to(accelerator.device))
    weight = global_weight(sums, accelerator)
    if not isinstance(weight, torch.Tensor):
        return weight
    # A window in which every item is masked has a loss of 0 / 0; it is to change nothing.
    return torch.where(weight == 0, 1, weight)


def keep_valid(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return `values` [B] with zeros where `valid` [B] is False, be they finite or not."""
    return values if valid is None else torch.where(valid.to(values.device), values, 0)


def clip_gradients(
    accelerator: Accelerator, model: torch.nn.Module, trainer: Trainer
) -> dict[str, torch.Tensor]:
    """Clip the gradients of `model` as the recipe says.

    Returns:
        `grad_norm`: this process's share of the total norm before clipping, if that is bounded.
    """
    values: dict[str, torch.Tensor] = {}
    if trainer.clip_grad_norm is not None:
        norm = accelerator.clip_grad_norm_(model.parameters(), trainer.clip_grad_norm)
        values["grad_norm"] = norm.detach() / accelerator.num_processes
    if trainer.clip_grad_value is not None:
        accelerator.clip_grad_value_(model.parameters(), trainer.clip_grad_value)
    return values
