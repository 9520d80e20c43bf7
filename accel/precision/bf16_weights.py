"""Optimizers that update bf16 weights: stochastic rounding that replicas share, lost updates.

A weight in bf16 has 8 bits of mantissa: rounded to the nearest, an update of less than half a unit
in its last place (2**-9 of the weight) changes nothing, however often it is made. Rounded up or
down at random, in proportion to the distance, it is kept in the mean. Master weights in fp32 (what
mixed precision keeps) hold it exactly, in twice the memory.

Source: https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel.comm import rng
from accel.logging import get_logger
from accel.machine.errors import CheckpointError, Problem
from accel.precision.amp import parameters_of

if TYPE_CHECKING:
    from accel.comm.base import Communicator

logger = get_logger(__name__)

# The attribute by which torchao's optimizers say that they round so; others may have it, too.
ATTRIBUTE = "bf16_stochastic_round"
STATE = "stochastic_rounding"  # key in an optimizer's state dict
# The least decay that a moment in bf16 can follow: half a unit in its last place, at the least.
DECAY = 2.0**-9
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
    though each rank draws its own dropout. Ranks that hold other shards of all its weights in bf16
    draw differently. The torch generators are as before after each step. Seed and number are a part
    of the optimizer's state dict.

    Args:
        seed: of the optimizer in the run, the same on every rank.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.steps = seed, 0
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._has_stepped = False  # in this process

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap each step of `optimizer`, and its state dict."""
        optimizer.register_step_pre_hook(self._seed)
        optimizer.register_step_post_hook(self._restore)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def _seed(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Seed torch's generators for the update; a closure computes with the run's own states."""
        if not holds_bf16(optimizer):
            return None
        if self._before is None:  # else a step raised: what was before that one is restored
            self._before = rng.torch_states()
        place = common_coordinates(optimizer)
        numbers = [self.seed, self.steps, *([digest(place)] if place else [])]
        torch.manual_seed(rng.mix_seeds(*numbers))
        calls = itertools.count(1)

        def computed(closure: Callable[[], object]) -> Callable[[], object]:
            @functools.wraps(closure)
            def call() -> object:
                if self._before is not None:
                    rng.set_torch_states(self._before)
                try:
                    return closure()
                finally:  # ranks may have drawn differently: what follows is seeded again
                    self._before = rng.torch_states()
                    torch.manual_seed(rng.mix_seeds(*numbers, next(calls)))

            return call

        return _with_closure(args, kwargs, computed)

    def _restore(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._before is None:  # no weight was in bf16
            return
        self.steps += 1
        if not self._has_stepped:
            warn_of_moments(optimizer)
        self._has_stepped = True
        rng.set_torch_states(self._before)
        self._before = None

    def _save(self, optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
        if self.steps or holds_bf16(optimizer):
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


def _with_closure(
    args: tuple[object, ...],
    kwargs: dict[str, object],
    change: Callable[[Callable[[], object]], Callable[[], object]],
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Return the arguments of a step (the optimizer first) with a changed closure, if any."""
    named = kwargs.get("closure")
    if callable(named):
        return args, {**kwargs, "closure": change(named)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], change(args[1]), *args[2:]), kwargs
    return None


def shard_coordinates(parameter: torch.Tensor) -> tuple[tuple[str, int], ...]:
    """Return the place of this process along each mesh axis that a parameter is sharded over.

    Returns:
        Pairs of an axis's name and the coordinate on it; empty for a tensor that is not sharded.
    """
    mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
    if mesh is None:
        return ()
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return tuple(
        (str(name), int(place))
        for name, place, placement in zip(
            names, mesh.get_coordinate(), getattr(parameter, "placements", ()), strict=True
        )
        if not placement.is_replicate()
    )


def common_coordinates(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, int], ...]:
    """Return the coordinates along the mesh axes that all weights in bf16 are sharded over.

    Ranks along another axis hold replicas of some of them, which must be rounded alike.
    """
    places = [shard_coordinates(p) for p in parameters_of(optimizer) if p.dtype == torch.bfloat16]
    return tuple(pair for pair in places[0] if all(pair in p for p in places)) if places else ()


def digest(place: tuple[tuple[str, int], ...]) -> int:
    """Return a number for the coordinates of a shard, the same in every process."""
    return zlib.crc32(repr(place).encode())


def _slow_moments(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the decay rates of second moments that change by less than a step of bf16."""
    betas: Iterable[Any] = (group.get("betas") for group in optimizer.param_groups)
    second = (b[1] for b in betas if isinstance(b, list | tuple) and len(b) > 1)
    return sorted({float(beta) for beta in second if float(beta) > 1 - DECAY})


def warn_of_moments(optimizer: torch.optim.Optimizer) -> None:
    """Warn of second moments in bf16 that cannot fall."""
    in_bf16 = any(
        isinstance(value, torch.Tensor)
        and type(value).__module__.partition(".")[0] == "torch"  # not in blocks
        and value.dtype == torch.bfloat16
        and value.dim() > 0
        for state in optimizer.state.values()
        for value in state.values()
    )
    slow = _slow_moments(optimizer) if in_bf16 else []
    if slow:
        logger.warning_once(
            "%s keeps moments in bf16: %s", type(optimizer).__name__, _fate_of_moments(slow[-1])
        )


def _fate_of_moments(beta: float) -> str:
    return (
        f"with a decay rate of {beta:g} a step changes a second moment by less than a unit in its "
        "last place, so that it rises but never falls, and updates stay too small. Keep moments in "
        "fp32 (accel.precision.rounding_adamw.RoundingAdamW), or set the rate to 0.99."
    )


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, comm: Communicator, number: int = 0
) -> None:
    """Let replicas round alike; warn of an optimizer that loses small updates of bf16 weights.

    What rounds stochastically is prepared though it has no weights in bf16 yet: they may be added,
    unfrozen or converted later.

    Collective where the optimizer rounds stochastically.

    Args:
        optimizer: to prepare.
        comm: over all ranks.
        number: of the optimizer in the run, from 0: each has draws of its own.
    """
    if not rounds_stochastically(optimizer):
        if holds_bf16(optimizer):
            _warn_of_lost_updates(optimizer)
        return
    if optimizer not in _SHARED:
        (seed,) = comm.broadcast_objects([torch.initial_seed()])
        _SHARED[optimizer] = SharedDraws(rng.mix_seeds(int(seed), number))
        _SHARED[optimizer].register(optimizer)


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer) -> None:
    slow = _slow_moments(optimizer)
    logger.warning_once(
        "%s updates weights in bf16, rounded to the nearest: updates of less than 2**-9 of a "
        "weight are lost. Keep the weights in fp32 (mixed_precision='bf16' computes in bf16), "
        "or round stochastically: accel.precision.rounding_adamw.RoundingAdamW, or "
        "torchao.optim.AdamW8bit(…, bf16_stochastic_round=True).%s",
        type(optimizer).__name__,
        f" Its moments are in bf16, too: {_fate_of_moments(slow[-1])}" if slow else "",
    )
