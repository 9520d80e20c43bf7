"""Whether a recipe's model may be built as the strategy initializes models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import ConfigError, Problem

if TYPE_CHECKING:
    from runner.config.schema import Recipe


def check(recipe: Recipe) -> None:
    """Refuse to initialize on rank 0 only the models that a step builds itself, on every rank.

    Raises:
        ConfigError: if that is asked for.
    """
    plugin = recipe.fsdp
    if recipe.model is None and plugin is not None and plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            Problem(
                "cpu_ram_efficient_loading=true with model=null",
                "the step builds its own models, with weights on every process",
                "Leave it out (or its variable in the environment), or choose model=….",
            )
        )
