"""Where the weights of a model are drawn: on every process, or on the first alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from accel.errors import ConfigError, Problem
from accel.rng import synchronize_rng_states

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.config.schema import Recipe


def drawn_once(recipe: Recipe, accelerator: Accelerator) -> bool:
    """Return whether only the first process holds weights before the engine spreads them.

    Raises:
        ConfigError: if that is asked of a step that builds its own models.
    """
    if not accelerator.strategy.weights_on_first:
        return False
    if recipe.model is None:
        raise ConfigError(
            Problem(
                "fsdp.cpu_ram_efficient_loading=true with model=null",
                "the step builds its own models, with weights on every process",
                "Leave it out (or FSDP_CPU_RAM_EFFICIENT_LOADING), or choose model=….",
            )
        )
    return accelerator.num_processes > 1


@contextlib.contextmanager
def on_first_process(accelerator: Accelerator) -> Iterator[None]:
    """Context in which a model gets weights on the first process, and no memory on the others.

    After it, torch's generator is everywhere where the first process left it, as if all had drawn.
    """
    with contextlib.nullcontext() if accelerator.is_main_process else torch.device("meta"):
        yield
    synchronize_rng_states(["torch"])
