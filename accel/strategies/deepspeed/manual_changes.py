"""Weights and gradients that are changed by hand, of which the engine's step knows nothing."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from accel.errors import Problem
from accel.strategies.deepspeed.shards import pieces

_WINDOWS = 3  # after which weights are looked at, besides their version counters
_ELEMENTS = 16  # of a weight


class ByHand:
    """Warns once of changes that the next step of an engine overwrites or ignores.

    The step computes weights from the optimizer's own copies of them, and takes gradients that are
    not in `parameter.grad`. Under stage 3 a parameter is a place holder, and what is written to it
    is lost; `deepspeed.zero.GatheredParameters` writes it to the shards, which are the optimizer's
    own copies in fp32 alone.

    Args:
        engine: its `DeepSpeedEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        stage = engine.zero_optimization_stage()
        copies = hasattr(engine.optimizer, "optimizer")  # of the weights, which it steps
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        self._weights = trained if copies else []
        self._sharded = stage == 3
        self._gradients = stage in (1, 2)
        self._left = _WINDOWS
        self._versions: list[int] = []
        self._shard_versions: list[int] = []
        self._values: list[torch.Tensor] = []
        self.note()

    def note(self) -> None:
        """Note the weights as a step left them."""
        self._versions = [weight._version for weight in self._weights]
        self._values = []
        if self._sharded:
            self._shard_versions = [weight.ds_tensor._version for weight in self._weights]
        elif self._left and self._weights:
            self._left -= 1
            self._values = [_start(weight).clone() for weight in self._weights]

    def check(self) -> None:
        """Warn of what was changed since `note`, before the step that does not heed it."""
        if self._gradients and any(weight.grad is not None for weight in self._weights):
            self._gradients = False
            self._tell(
                "gradients that were set in parameter.grad",
                "the step takes the gradients that its backward passes gathered elsewhere",
                "Change gradients with deepspeed.utils.safe_set_full_grad, or the loss.",
            )
        if self._weights and self._is_overwritten():
            self._weights = []
            self._tell(
                "weights that were changed by hand since the last step",
                "the step computes them from the optimizer's own copies, and overwrites the change",
                "Set the copies, with deepspeed.utils.safe_set_full_fp32_param, or load them with "
                "accelerator.load_state.",
            )

    def _is_overwritten(self) -> bool:
        changed = [
            weight
            for weight, version in zip(self._weights, self._versions, strict=True)
            if weight._version != version
        ]
        if self._values:
            pairs = zip(self._weights, self._values, strict=True)
            changed += [w for w, v in pairs if not _same(_start(w), v)]
        if not changed:
            return False
        where = pieces(self._engine)
        if self._sharded:
            shards = zip(self._weights, self._shard_versions, strict=True)
            unwritten = {id(weight) for weight, v in shards if weight.ds_tensor._version == v}
            if any(id(weight) in unwritten for weight in changed):
                return True
        return any(not _agrees(weight, where.get(id(weight))) for weight in changed)

    def _tell(self, value: str, rule: str, remedy: str) -> None:
        stage = self._engine.zero_optimization_stage()
        told = Problem(f"{value}, under DeepSpeed's ZeRO {stage}", rule, remedy)
        warnings.warn(str(told), stacklevel=4)


def _start(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().reshape(-1)[:_ELEMENTS]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _agrees(weight: torch.Tensor, piece: Any) -> bool:
    """Tell whether this rank's part of a weight is what the optimizer holds of it."""
    if piece is None or piece.length == 0 or piece.flat.numel() < piece.start + piece.length:
        return True
    shard = getattr(weight, "ds_tensor", None)  # under stage 3: the part alone
    values, start = (weight, piece.offset) if shard is None else (shard, 0)
    own = values.detach().reshape(-1)[start : start + piece.length]
    held = piece.flat.detach().view(-1)[piece.start : piece.start + piece.length]
    return _same(own, held.to(own.device, own.dtype))
