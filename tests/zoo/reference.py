"""The reference: a plain PyTorch loop, and how far it is from itself."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import cache

import torch

from tests.parity.reference import Recipe
from tests.zoo.cells import BATCH_SIZE, NUM_STEPS
from tests.zoo.models import MODELS, UNFROZEN_AT, freeze

# As in the parity matrix, with an `eps` of the size of a gradient: Adam then answers to the size of
# gradients, not to their sign alone, so that a gradient that is divided once too often shows, and
# rounding does not turn into whole steps. With it the plain loop in fp32 is within 2e-7 of itself
# for each model, its batches cut in two; at 1e-5 within 1.6e-3 (T5).
RECIPE = Recipe(lr=3e-3, eps=1e-3, max_norm=None)


@dataclass
class Run:
    """What a training run leaves.

    Attributes:
        losses: of each step, the mean over the batch.
        weights: by name, float32.
        model: trained, in fp32.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    model: torch.nn.Module | None = None


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of all parameters, frozen ones included."""
    return RECIPE.optimizer(model.parameters())


@cache
def plain(name: str, num_chunks: int = 1, autocast: bool = False) -> Run:
    """Return what the plain loop leaves.

    Args:
        name: of the model.
        num_chunks: pieces of as many samples that each batch is cut into.
        autocast: whether forward passes run under autocast to bf16.
    """
    entry = MODELS[name]
    model = entry.build()
    optimizer = make_optimizer(model)
    run = Run(model=model)
    for step in range(NUM_STEPS):
        if entry.unfreezes and step == UNFROZEN_AT:
            freeze(model, False)
        batch = entry.batch(step, BATCH_SIZE)
        total = 0.0
        for index in range(num_chunks):
            part = {key: tensor.chunk(num_chunks)[index] for key, tensor in batch.items()}
            context = torch.autocast("cpu", torch.bfloat16) if autocast else None
            with context or contextlib.nullcontext():
                loss = model(**part).loss / num_chunks
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(total)
    run.weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return run
