"""Whether a recipe's model may be built as the strategy initializes models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.machine.errors import ConfigError
from accel.plan.choose_strategy import selected

if TYPE_CHECKING:
    from runner.recipe.schema import Recipe


def check(recipe: Recipe) -> None:
    """Refuse to initialize on rank 0 only the models that a step builds itself, on every rank.

    Raises:
        ConfigError: if that is requested.
    """
    found = selected(recipe.plugins, 1)
    setting = found.spec.rank0_init(found.plugins)
    if recipe.model is None and setting:
        raise ConfigError.of(
            f"{setting} with model=null",
            "the step builds its own models, with weights on every rank",
            "Leave it out, or choose model=….",
        )
