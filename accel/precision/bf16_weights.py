"""Optimizers that update bf16 weights: stochastic rounding that replicas share, lost updates.

A weight in bf16 has 8 bits of mantissa: rounded to the nearest, an update of less than half a unit
in its last place (2**-9 of the weight) changes nothing, however often it is made. Rounded up or
down at random, in proportion to the distance, it is kept in the mean. Master weights in fp32 (what
mixed precision keeps) hold it exactly, in twice the memory.

Source: https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel import rng
from accel.errors import CheckpointError, Problem
from accel.logging import get_logger
from accel.precision.amp import parameters_of

if TYPE_CHECKING:
    from accel.comm.base import Communicator

logger = get_logger(__name__)

# The attribute by which torchao's optimizers say that they round so; others may have it, too.
ATTRIBUTE = "bf16_stochastic_round"
STATE = "stochastic_rounding"  # key in an optimizer's state dict
_SHARED: weakref.WeakKeyDictionary[torch.optim.Optimizer, SharedDraws] = weakref.WeakKeyDictionary()


def holds_bf16(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer updates weights that are themselves in bf16."""
    return any(p.dtype == torch.bfloat16 and p.requires_grad for p in parameters_of(optimizer))


def rounds_stochastically(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer says that it rounds updates of bf16 weights stochastically."""
    return getattr(optimizer, ATTRIBUTE, False) is True


class SharedDraws:
    """Makes the draws of each step of an optimizer a function of a seed and the step's number.

    So every data-parallel rank rounds alike, and replicas of a weight stay equal bit for bit,
    though each rank draws its own dropout. The torch generators are as before after each step. Seed
    and number are a part of the optimizer's state dict.

    Args:
        seed: of the run, the same on every rank.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.steps = seed, 0
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap each step of `optimizer`, and its state dict."""
        optimizer.register_step_pre_hook(self._seed)
        optimizer.register_step_post_hook(self._restore)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def _seed(self, *_: object) -> None:
        if self._before is None:  # else a step raised: what was before that one is restored
            self._before = rng.torch_states()
        torch.manual_seed(rng.mix_seeds(self.seed, self.steps))

    def _restore(self, *_: object) -> None:
        self.steps += 1
        if self._before is not None:
            rng.set_torch_states(self._before)
        self._before = None

    def _save(self, _: object, state: dict[str, object]) -> None:
        state[STATE] = {"seed": self.seed, "steps": self.steps}

    def _load(self, _: object, state: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(state)
        saved = own.pop(STATE, None)  # None: by an optimizer that rounds to the nearest
        if saved is not None:
            try:
                self.seed, self.steps = int(saved["seed"]), int(saved["steps"])
            except (KeyError, TypeError, ValueError) as error:
                rule = "it holds the seed and the number of steps"
                raise CheckpointError(
                    Problem(f"optimizer: {STATE}={saved!r}", rule, "Use another checkpoint.")
                ) from error
        return own


def prepare_optimizer(optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
    """Let replicas round alike; warn of an optimizer that loses small updates of bf16 weights.

    Collective where the optimizer rounds stochastically.
    """
    if not holds_bf16(optimizer):
        return
    if not rounds_stochastically(optimizer):
        logger.warning_once(
            "%s updates weights in bf16, rounded to the nearest: updates of less than 2**-9 of a "
            "weight are lost. Keep the weights in fp32 (mixed_precision='bf16' computes in bf16), "
            "or round stochastically: torchao.optim.AdamW8bit(…, bf16_stochastic_round=True).",
            type(optimizer).__name__,
        )
        return
    if optimizer not in _SHARED:
        (seed,) = comm.broadcast_objects([torch.initial_seed()])
        _SHARED[optimizer] = SharedDraws(int(seed))
        _SHARED[optimizer].register(optimizer)
