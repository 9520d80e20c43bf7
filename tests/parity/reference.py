"""The reference: a plain PyTorch loop. It imports torch and nothing of the project.

Shapes: B samples of an optimizer step, T bytes of context, V byte values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

IGNORED = -100  # a target that does not count


@dataclass(frozen=True)
class Recipe:
    """How weights are updated; defined once, so that every run and every control shares it.

    AdamW divides by the root of the second moment plus `eps`. Where a gradient is near zero, a tiny
    `eps` turns rounding into whole steps: at 1e-8 two orders of summing a batch end ten times as
    far apart (1.5e-6 in the weights) as at 1e-5 (1.2e-7), and a gate of five noise floors would be
    that much weaker. 1e-5 is about a hundredth of a typical gradient: updates stay those of Adam.

    `max_norm` lies between half the usual norm of the gradients and the whole (1.5 to 3.7):
    clipping acts, and cannot hide a gradient that is divided once too often.

    Args:
        lr: learning rate, constant.
        eps: added to the root of the second moment.
        weight_decay: decoupled, of all parameters.
        max_norm: largest total norm of the gradients; None: not clipped.
    """

    lr: float = 3e-4
    eps: float = 1e-5
    weight_decay: float = 0.1
    max_norm: float | None = 1.5

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
        """Return the optimizer of `parameters`."""
        return torch.optim.AdamW(
            parameters, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay
        )


@dataclass
class Run:
    """What a training run leaves.

    Attributes:
        losses: of each optimizer step: summed loss over summed weight.
        weights: by parameter name, whole, float32 on the CPU.
        num_bytes: live tensor storages on this process, by the moment they were counted at.
        norms: of the gradients before clipping, one a step.
        rounded: whether each loss that the model returned is a number of bf16.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    rounded: list[bool] = field(default_factory=list)


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the nats of all targets that count: [] of logits [B, T, V] and targets [B, T]."""
    logits = getattr(logits, "logits", logits)  # of transformers' models
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def train(
    model: torch.nn.Module,
    steps: Iterable[tuple[torch.Tensor, torch.Tensor]],
    recipe: Recipe,
    num_chunks: int = 1,
    autocast: torch.dtype | None = None,
    count: Callable[[int, str], int | None] = lambda step, moment: None,
    own_loss: bool = False,
) -> Run:
    """Train `model` on this process.

    Args:
        model: logits [B, T, V] of bytes [B, T].
        steps: the whole batch of each optimizer step: bytes [B, T] and targets [B, T].
        recipe: how weights are updated.
        num_chunks: pieces that each batch is cut into, gradients summed in their order; a batch of
            fewer samples gives fewer pieces.
        autocast: what forward passes compute in; None: float32.
        count: called with the number of the step and "before" or "after" it; returns the live bytes
            if they are wanted then.
        own_loss: whether `model` returns the summed loss [] of (bytes, targets).
    """
    optimizer = recipe.optimizer(model.parameters())
    run = Run()
    for number, (values, targets) in enumerate(steps):
        weight = (targets != IGNORED).sum()
        total = torch.zeros((), dtype=torch.float64)
        for part, wanted in zip(values.chunk(num_chunks), targets.chunk(num_chunks), strict=True):
            with _context(values.device.type, autocast):
                answer = model(part, wanted) if own_loss else model(part)
            loss = (answer if own_loss else summed_loss(answer, wanted)) / weight
            loss.backward()
            total += loss.detach().double().cpu()
            del answer, loss
        if recipe.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            run.norms.append(norm.item())
        _note(run, count, number, "before")
        optimizer.step()
        _note(run, count, number, "after")
        optimizer.zero_grad()
        run.losses.append(total.item())
    run.weights = {k: v.detach().float().cpu().clone() for k, v in model.state_dict().items()}
    return run


def _context(
    device_type: str, autocast: torch.dtype | None
) -> contextlib.AbstractContextManager[object]:
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=autocast)


def _note(run: Run, count: Callable[[int, str], int | None], number: int, moment: str) -> None:
    num_bytes = count(number, moment)
    if num_bytes is not None:
        run.num_bytes[moment] = num_bytes
