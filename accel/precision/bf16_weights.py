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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch.autograd.graph import Node, get_gradient_edge

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


# -- gradients of bf16 weights, summed in fp32 over a window of micro-batch -------------------


_BF16 = torch.bfloat16


@final
class Fp32Sum:
    """The gradient of a parameter over a window, in fp32, from its second backward pass on.

    A gradient that autograd is about to add to ``.grad`` is added to the sum; then ``.grad`` is
    zero, and what autograd adds is the sum, rounded. So ``.grad`` stays the same tensor, as a view
    of DDP's bucket, and all hooks of a parameter find what they find without the sum. Where
    ``.grad`` is not what the sum rounds to, somebody has written to it, as clipping does: there,
    what is in ``.grad`` counts.

    Two kinds of passes are left to autograd, which adds in bf16, and the sum goes on after them:
    those that make a graph of gradients (``create_graph=True``), and the first one with another
    hook of the node after this one, which may change the gradient, or fail while ``.grad`` is zero.

    Attributes:
        parameter: [...] in bf16. No weak reference: torch swaps no tensor that has one.
    """

    def __init__(self, parameter: torch.Tensor, node: Node) -> None:
        self.parameter = parameter
        self._sum: torch.Tensor | None = None  # [...] in fp32
        self._shown: torch.Tensor | None = None  # [...] in `.grad`; None: the sum, rounded
        self._handle = node.register_prehook(self._add)

    def release(self) -> None:
        """Free the memory of the sum; ``.grad`` stays."""
        self._sum = self._shown = None

    def remove(self) -> None:
        """Sum no longer."""
        self._handle.remove()
        self.release()

    def _add(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Return what autograd adds to ``.grad``; None: the gradient itself."""
        former, (gradient,) = self.parameter.grad, gradients
        if gradient is None:
            return None
        is_left = torch.is_grad_enabled() or self._is_followed()
        if former is None or not (_is_summable(former) and _is_summable(gradient)):
            self.release()
            return None
        if is_left:
            former, gradient = former.detach(), gradient.detach()
        held = self._sum
        if held is None:
            held = former.float()
        else:
            shown = held.bfloat16() if self._shown is None else self._shown
            held = torch.where(shown == former, held, former)
        self._sum = held.add_(gradient)
        if is_left:
            self._shown = former + gradient
            return None
        self._shown = None
        rounded = held.bfloat16()
        former.zero_()
        return (rounded,)

    def _is_followed(self) -> bool:
        """Return whether another hook comes after this one, which is the last from now on."""
        hooks, own = self._handle.hooks_dict_ref() or {}, self._handle.id
        for number in reversed(hooks):
            if number == own:
                break
            if not isinstance(getattr(hooks[number], "__self__", None), Fp32Sum):
                hooks[own] = hooks.pop(own)
                return True
        return False


@final
class OptimizerSums:
    """The sums of the weights of one optimizer, by the node of autograd that adds to ``.grad``.

    Attributes:
        sums: those of its weights in bf16 that have been trainable within the window, or before.
        is_open: whether a window is open: from its first micro-batch to the step.
    """

    def __init__(self) -> None:
        self.sums: dict[Node, Fp32Sum] = {}
        self.is_open = False
        self._seen: dict[int, torch.Tensor] = {}  # by id: looked at since the window was opened
        self._sample: tuple[torch.Tensor, Node] | None = None

    def open(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at all weights again: torch gives those that it converts other nodes."""
        former, self.sums = self.sums, {}
        self.is_open, self._seen, self._sample = True, {}, None
        for parameter in self._unseen(optimizer):
            self._follow(parameter, former)
        if former:
            frozen = {
                id(p)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.dtype is _BF16 and not p.requires_grad
            }
            for node, held in former.items():
                if id(held.parameter) in frozen:
                    self.sums[node] = held
                else:
                    held.remove()

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at weights that were added, unfrozen or converted since the window was opened.

        A model that was converted and back shows by the node of one of its weights.
        """
        if self._sample is not None:
            parameter, node = self._sample
            if parameter.requires_grad and _node(parameter) is not node:
                self.open(optimizer)
                return
        for parameter in self._unseen(optimizer):
            self._follow(parameter, {})

    def close(self) -> None:
        """Free the memory of the sums: the optimizer steps."""
        self.is_open = False
        for held in self.sums.values():
            held.release()

    def remove(self) -> None:
        """Sum no longer: the optimizer is gone."""
        for held in self.sums.values():
            held.remove()

    def _unseen(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        seen = self._seen
        return [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.dtype is _BF16 and id(p) not in seen and p.requires_grad
        ]

    def _follow(self, parameter: torch.Tensor, former: dict[Node, Fp32Sum]) -> None:
        self._seen[id(parameter)] = parameter  # which keeps its id
        if not parameter.is_leaf or hasattr(parameter, "device_mesh"):  # of a DTensor
            return
        node = _node(parameter)
        held = former.pop(node, None) or self.sums.get(node)
        self.sums[node] = held or Fp32Sum(parameter, node)
        if self._sample is None:
            self._sample = parameter, node


# An optimizer has its parameters, and so have the nodes and sums: all are freed with it.
_OPTIMIZERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerSums] = (
    weakref.WeakKeyDictionary()
)


def sum_in_fp32(optimizers: Iterable[torch.optim.Optimizer], is_new: bool) -> None:
    """Have the gradients of all trainable bf16 weights of `optimizers` summed in fp32.

    From the next backward pass on. A step frees the sums. Sharded weights (DTensor) are left to
    their strategy: FSDP2 reduces gradients, and sums them, in its own dtype.

    Args:
        optimizers: those that `prepare` was given.
        is_new: whether a window begins; else it goes on, or begins after a step of the optimizer.
    """
    for optimizer in optimizers:
        sums = _OPTIMIZERS.get(optimizer)
        if sums is None:
            sums = _OPTIMIZERS[optimizer] = OptimizerSums()
            # DDP's reducer keeps the nodes, and with them the sums, of a model that stays.
            weakref.finalize(optimizer, sums.remove).atexit = False
            # A wrapper that does not call Optimizer.__init__ has no hooks: it keeps its memory.
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(_close)
        if is_new or not sums.is_open:
            sums.open(optimizer)
        else:
            sums.extend(optimizer)


def sum_unfrozen_in_fp32(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have weights take part that were added or unfrozen within the windows that are open.

    Args:
        optimizers: those that `prepare` was given.
    """
    for optimizer in optimizers:
        sums = _OPTIMIZERS.get(optimizer)
        if sums is not None and sums.is_open:
            sums.extend(optimizer)


def _close(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if optimizer in _OPTIMIZERS:
        _OPTIMIZERS[optimizer].close()


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


def _is_summable(gradient: torch.Tensor) -> bool:
    return gradient.dtype is _BF16 and gradient.layout is torch.strided


def _node(parameter: torch.Tensor) -> Node:
    """Return what adds to the gradient of a parameter: another one after a change of its dtype."""
    return get_gradient_edge(parameter).node
