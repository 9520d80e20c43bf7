"""Weights in bf16 (`precision.weights`): models are cast as they are built, optimizers checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from accel.machine.errors import Problem, Problems
from accel.plan.choose_strategy import selected
from accel.precision.bf16_weights import holds_bf16, rounds_stochastically

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe

REMEDY = "Add optimizer.stochastic_rounding=true (optimizer=adamw)"


def strategy_problems(recipe: Recipe) -> list[Problem]:
    """Return the problem that a strategy decides the format of weights itself."""
    found = selected(recipe.plugins, 1)
    if recipe.precision.weights is None or not found.spec.owns_parameters:
        return []
    return [
        Problem(
            f"precision.weights={recipe.precision.weights} with {found.spec.label(found.plugins)}=",
            "optimizers step its master weights, which it keeps in fp32 beside those in bf16",
            "Choose precision=bf16.",
        )
    ]


def cast(model: object, recipe: Recipe) -> None:
    """Give the parameters of a model the format that a recipe names, in place; buffers keep theirs.

    Running statistics and tables of positions need the bits that weights can do without.
    """
    if recipe.precision.weights is None or not isinstance(model, torch.nn.Module):
        return
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def check(
    recipe: Recipe,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> None:
    """Refuse models and optimizers of a step that do not fit the format of its weights.

    Raises:
        ConfigError: naming all of them.
    """
    found = Problems()
    wanted = recipe.precision.weights
    for name, model in models.items() if wanted else ():
        kept = sum(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
        if kept:
            found.add(
                f"precision.weights={wanted}: {kept} parameters of {name!r} are in fp32",
                "a step that builds its models itself decides their format",
                "Build them in bf16 there, or choose precision=bf16.",
            )
    for name, optimizer in optimizers.items():
        in_bf16, rounds = holds_bf16(optimizer), rounds_stochastically(optimizer)
        kind = type(optimizer).__name__
        if wanted and in_bf16 and not rounds:
            found.add(
                f"precision.weights={wanted} with {name}: {kind}",
                "it rounds to the nearest: updates of less than 2**-9 of a weight are lost",
                f"{REMEDY}, or choose precision=bf16, which keeps weights in fp32.",
            )
        if rounds and not in_bf16:
            found.add(
                f"{name}: {kind} with stochastic rounding",
                "it concerns weights in bf16, and there are none",
                "Choose precision=bf16_weights, or optimizer.stochastic_rounding=false.",
            )
    found.raise_if()
