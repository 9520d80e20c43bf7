"""How the losses of an optimizer step are weighted: the one place that knows.

The gradient of a step is that of the summed loss over the summed weight (samples or tokens), over
all processes and micro-batches; N accumulated micro-batches on one process and one micro-batch on
each of N processes give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from accel.accelerator import Accelerator

Total = TypeVar("Total", float, torch.Tensor)


def normalize_loss(
    total: Total, global_weight: float | torch.Tensor, *, grad_size: int, num_steps: int
) -> Total:
    """Return what to give to `Accelerator.backward`, so that the step's gradient is the exact mean.

    Gradients are averaged over `grad_size` ranks, and `backward` divides by the micro-batches;
    both are undone here, so that what remains is ``d(sum of all losses) / global_weight``.

    Args:
        total: [] summed loss of one micro-batch of this process.
        global_weight: summed weight of the full step, over all processes and micro-batches.
        grad_size: over how many ranks gradients are averaged:
            `accelerator.parallel_dims.grad_size`.
        num_steps: what `backward` divides by: `Accelerator.gradient_accumulation_steps`.

    Returns:
        [] the loss to differentiate.
    """
    return total * (grad_size * num_steps) / global_weight  # type: ignore[return-value]


def global_weight(
    weights: Sequence[torch.Tensor | int], accelerator: Accelerator
) -> torch.Tensor | int:
    """Return the summed weight of an optimizer step over all processes. Never waits for the device.

    Ranks that compute the same samples together (tensor parallelism) count once.

    Args:
        weights: one per micro-batch. Integers are weights that every process knows to be global
            (the count of real samples over all processes); tensors ([] or [B]) are this process's
            own.
        accelerator: of the run.

    Returns:
        The sum: an integer if all weights are, else a 0-d tensor (one all-reduce).
    """
    local = [weight.sum() for weight in weights if isinstance(weight, torch.Tensor)]
    known = sum(weight for weight in weights if not isinstance(weight, torch.Tensor))
    if not local:
        return known
    summed = accelerator.comm.all_reduce(torch.stack(local).sum(), "sum")
    copies = accelerator.parallel_dims.model_size
    if copies > 1:
        summed = summed / copies
    return summed + known if known else summed
