"""Optimizers that update bf16 weights: stochastic rounding that replicas share, lost updates.

A weight in bf16 has 8 bits of mantissa: rounded to the nearest, an update of less than half a unit
in its last place (2**-9 of the weight) changes nothing, however often it is made. Rounded up or
down at random, in proportion to the distance, it is kept in the mean. Master weights in fp32 (what
mixed precision keeps) hold it exactly, in twice the memory.

Source: https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch.autograd.graph import Node, get_gradient_edge

from accel.comm import rng
from accel.logging import get_logger
from accel.machine.errors import ConfigError
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
    though each rank draws its own dropout. Ranks that hold other shards of all its weights in bf16
    draw differently. The torch generators are as before after each step. Seed and number are a part
    of the optimizer's state dict.

    Args:
        seed: of the optimizer in the run, the same on every rank.
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

    def _seed(
        self, optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Seed torch's generators for the update."""
        if not holds_bf16(optimizer):
            return
        if any(map(callable, (*args[1:], kwargs.get("closure")))):
            raise ConfigError.of(
                f"{type(optimizer).__name__}.step(closure) with weights in bf16",
                "replicas share the random numbers of a step, which a closure would draw from, too",
                "Compute the loss before: accelerator.backward(loss), optimizer.step().",
            )
        if self._before is None:  # else a step raised: what was before that one is restored
            self._before = rng.torch_states()
        place = common_coordinates(optimizer)
        numbers = [self.seed, self.steps, *([digest(place)] if place else [])]
        torch.manual_seed(rng.mix_seeds(*numbers))

    def _restore(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._before is None:  # no weight was in bf16
            return
        self.steps += 1
        rng.set_torch_states(self._before)
        self._before = None

    def _save(self, optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
        if self.steps or holds_bf16(optimizer):
            state[STATE] = {"seed": self.seed, "steps": self.steps}

    def _load(self, _: object, state: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(state)
        saved = own.pop(STATE, None)  # None: by an optimizer that rounds to the nearest
        if saved is not None:
            self.seed, self.steps = int(saved["seed"]), int(saved["steps"])
        return own


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
    logger.warning_once(
        "%s updates weights in bf16, rounded to the nearest: updates of less than 2**-9 of a "
        "weight are lost. Keep the weights in fp32 (mixed_precision='bf16' computes in bf16), "
        "or round stochastically: accel.precision.rounding_adamw.RoundingAdamW, or "
        "torchao.optim.AdamW8bit(…, bf16_stochastic_round=True).",
        type(optimizer).__name__,
    )


# -- gradients of bf16 weights, summed in fp32 over a window of micro-batches ------------------


@final
class Fp32Sum:
    """The gradient of a parameter over a window, in fp32, from its second backward pass on.

    A gradient that autograd is about to add to ``.grad`` is added to the sum; then ``.grad`` is
    zero, and what autograd adds is the sum, rounded. So ``.grad`` stays the same tensor, as a view
    of DDP's bucket. Where ``.grad`` differs from the rounded sum, somebody has written to it, as
    clipping does: there, ``.grad`` counts.

    Attributes:
        parameter: [...] in bf16. No weak reference: torch swaps no tensor that has one.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self._sum: torch.Tensor | None = None  # [...] in fp32

    def release(self) -> None:
        """Free the memory of the sum; ``.grad`` stays."""
        self._sum = None

    def add(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Return what autograd adds to ``.grad``; None: the gradient itself.

        A gradient with a graph of its own (``create_graph=True``) is left to autograd.
        """
        former, (gradient,) = self.parameter.grad, gradients
        if gradient is None:
            return None
        if former is None or torch.is_grad_enabled() or not _are_dense(former, gradient):
            self.release()
            return None
        held = former if self._sum is None else self._sum
        self._sum = torch.where(held.bfloat16() == former, held, former).float().add_(gradient)
        former.zero_()
        return (self._sum.bfloat16(),)


# By optimizer: the sum of each weight by its id, with the node of autograd that calls it, which
# lives no longer than somebody holds it.
_SUMS: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[Node, Fp32Sum]]] = (
    weakref.WeakKeyDictionary()
)


def sum_in_fp32(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Sum the gradients of all trainable bf16 weights in fp32 from the next backward pass on.

    A step frees the sums. Sharded weights (DTensor) are left to their strategy: FSDP2 reduces
    gradients, and sums them, in its own dtype.

    Args:
        optimizers: those that `prepare` was given.
    """
    for optimizer in optimizers:
        if optimizer not in _SUMS:
            _SUMS[optimizer] = {}
            # A wrapper that does not call Optimizer.__init__ has no hooks: it keeps its memory.
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(_release)
        sums = _SUMS[optimizer]
        for parameter in parameters_of(optimizer):
            if id(parameter) in sums or not _is_summed(parameter):
                continue
            node, held = get_gradient_edge(parameter).node, Fp32Sum(parameter)
            node.register_prehook(held.add)
            sums[id(parameter)] = node, held


def _is_summed(parameter: torch.Tensor) -> bool:
    trains_bf16 = parameter.dtype is torch.bfloat16 and parameter.requires_grad
    return trains_bf16 and parameter.is_leaf and not hasattr(parameter, "device_mesh")


def _are_dense(*gradients: torch.Tensor) -> bool:
    return all(g.dtype is torch.bfloat16 and g.layout is torch.strided for g in gradients)


def _release(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for _node, held in _SUMS.get(optimizer, {}).values():
        held.release()


def clip_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_`, by a norm that is computed in fp32.

    torch computes it in the dtype of the gradients: in bf16, with an error of up to 2**-9.

    Args:
        parameters: whose gradients, in bf16 or any other dtype.
        max_norm: largest norm.
        norm_type: order of the norm.

    Returns:
        [] the norm before, in fp32, or fp64 where a gradient is.
    """
    norm_type = float(norm_type)  # torch takes "inf", too
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(hasattr(entry, "device_mesh") or entry.is_sparse for entry in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    in_bf16 = [entry for entry in gradients if entry.dtype == torch.bfloat16]
    others = [entry for entry in gradients if entry.dtype != torch.bfloat16]
    norms = [
        *(torch._foreach_norm(in_bf16, norm_type, dtype=torch.float32) if in_bf16 else ()),
        *(torch._foreach_norm(others, norm_type) if others else ()),
    ]
    total = torch.nn.utils.get_total_norm(norms, norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
