"""Shipped factories are tried on small stand-ins, so that a bad value shows before the start.

Models are built on the meta device; optimizers and schedules get a matrix of four numbers. The
user's own factories are not tried: they may read files, or take long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from accel.machine.errors import ConfigError, Problem
from runner.recipe import argument_errors, signatures

if TYPE_CHECKING:
    from runner.recipe.factory import Factory

SHIPPED = (
    *("torch.", "runner.builtin.", "runner.callbacks."),
    *("torchao.optim.", "bitsandbytes.optim."),
)
NUM_STEPS = 1 << 30


def problems(factory: Factory) -> list[Problem]:
    """Return the problems that a shipped factory has with its arguments."""
    kind = factory.key.partition(".")[0]
    shipped = str(getattr(factory.function, "__module__", "")).startswith(SHIPPED)
    if not shipped or kind not in TRIALS or factory.has_targets:
        return []
    found = (
        argument_errors.not_finite(factory.key, factory.arguments) if kind == "optimizer" else []
    )
    try:
        TRIALS[kind](factory)
    except ConfigError as error:
        found += error.problems
    return list(found)


def _model(factory: Factory) -> None:
    import torch

    with torch.device("meta"):
        factory()


def _optimizer(factory: Factory) -> object:
    import torch

    stand_in = torch.nn.Linear(2, 2, bias=False)
    return factory(stand_in if factory.by_name else stand_in.parameters())


def _scheduler(factory: Factory) -> None:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)
    made = factory(*((optimizer, NUM_STEPS) if factory.by_name else (optimizer,)))
    optimizer.step()
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return
    with argument_errors.factory_errors(factory.key, factory.place, factory.arguments):
        made.step()  # a period of 0 divides by zero here only


def _call(factory: Factory) -> None:
    factory()


def _step(factory: Factory) -> None:
    """Try a step that builds its own models."""
    if not any(
        name in signatures.read(factory.function).parameters for name in ("model", "optimizer")
    ):
        _model(factory)


TRIALS: dict[str, Callable[[Factory], object]] = {
    "model": _model,
    "step": _step,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "objective": _call,
    "callbacks": _call,
}
