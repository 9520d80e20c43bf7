"""Layers that are frozen, unfrozen, added or replaced after `prepare`, under DDP.

DistributedDataParallel decides once whose gradients it reduces. What is unfrozen later trains on
each rank's own gradients; of what is frozen later, the reducer waits for gradients in vain, and
leaves the rest of its bucket unreduced for that step. So each forward pass with gradients
compares the parameters with those that the reducer knows, and has it rebuilt where they differ.

Source: https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.utils import (
    _sync_params_and_buffers,
    _verify_param_shape_across_processes,
)
from torch.nn.parallel import DistributedDataParallel

from accel.machine.errors import ConfigError, Problem
from accel.precision.amp import parameters_of
from accel.strategies.trainable_changes import Trainable, requires_grad


class FollowTrainable:
    """A forward pre-hook of a model in DDP: has its reducer rebuilt where that is due.

    Every rank changes its model alike, as every rank runs the same script.

    Attributes:
        owner: number of the strategy that wrapped the model; None: the user did. Copies keep it.
        stepped: ids of the optimizers that stepped since the latest forward pass with gradients;
            None before the first one.
    """

    stepped: tuple[int, ...] | None = None

    def __init__(self, model: DistributedDataParallel, owner: int | None) -> None:
        self.owner = owner
        self._known: Trainable | None = Trainable(model.module)

    def __call__(self, model: DistributedDataParallel, *_: object) -> None:
        """Compare what `model` trains with what its reducer knows."""
        if torch.is_grad_enabled():
            self.stepped = ()  # also where this is compiled: written, and not read
            self.check(model)

    def check(self, model: DistributedDataParallel) -> None:
        """Rebuild the reducer of `model` if it trains other parameters than the reducer knows.

        Raise `ConfigError` where that cannot be: other ranks have run out of batches already.
        """
        if torch.compiler.is_compiling():
            return
        if self._known is None:  # of a copy, which built its reducer itself
            self._known = Trainable(model.module)
        if not self._known.changed() or "reducer" not in model.__dict__:
            return
        now = Trainable(model.module)
        # Frozen as a whole for a while, as a discriminator in its generator's step: no hook fires.
        if not now.trained:
            return
        ConfigError.raise_if(_problems(model))
        _synchronize_new(model, self._known, now)
        if model.static_graph and not model.require_backward_grad_sync:
            return  # torch learns a static graph from a pass that synchronizes
        if {id(p) for p in now.trained} != {id(p) for p in self._known.trained}:
            rebuild(model, self._known, now)
        self._known = now

    def __getstate__(self) -> dict[str, object]:
        return {"_known": None, "owner": self.owner}


def _problems(model: DistributedDataParallel) -> list[Problem]:
    value = "parameters that were frozen, unfrozen or added after prepare"
    if model._join_config.enable:
        rule = "ranks that have run out of batches reduce the gradients of those of before"
        remedy = "Change them between passes, outside of join_uneven_inputs."
        return [Problem(f"join_uneven_inputs: {value}", rule, remedy)]
    if model._use_python_reducer:
        rule = "gradients are reduced in the graph that was compiled before"
        remedy = "Change them before prepare, or leave torch._dynamo.config.optimize_ddp as it is."
        return [Problem(f"optimize_ddp='python_reducer': {value}", rule, remedy)]
    return []


def rebuild(model: DistributedDataParallel, before: Trainable, now: Trainable) -> None:
    """Give `model` a reducer of the parameters that it trains now. Called on every rank.

    Communication hooks, the static graph, buckets' sizes and all other options stay.
    """
    parameters, sparse = model._build_params_for_reducer()
    _verify_param_shape_across_processes(model.process_group, parameters, model.logger)
    kept = {id(p) for p in now.trained}
    _average(model, [p for p in before.trained if id(p) not in kept])
    hooks, static = list(model._comm_hooks), model.static_graph
    model.reducer._remove_autograd_hooks()
    mapping = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, mapping, static)
    model._has_rebuilt_buckets = False
    if static:
        model.static_graph = False
        model._set_static_graph()
    model._comm_hooks.clear()
    for hook, state in hooks:
        if isinstance(state, PowerSGDState):  # what it knows is of buckets that are gone
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()
            state.iter = state.next_stats_report = 0
        model.register_comm_hook(state, hook)


def _synchronize_new(model: DistributedDataParallel, before: Trainable, now: Trainable) -> None:
    """Give new parameters the values of rank 0, and let new buffers be synchronized with the rest.

    Called on every rank.
    """
    known, names = {id(p) for p in before.parameters}, model.parameters_to_ignore
    own = {n: p for n, p in model.module.named_parameters() if n not in names}
    new = [p.detach() for p in own.values() if id(p) not in known]
    if new:
        _sync_params_and_buffers(model.process_group, new, model.broadcast_bucket_size, 0)
    model._module_parameters = list(own.values())
    model._assign_modules_buffers()


def _average(model: DistributedDataParallel, parameters: list[torch.nn.Parameter]) -> None:
    """Average gradients that were accumulated before their parameters were frozen.

    A rank that did not use a parameter has no gradient of it, and counts as one of zeros; where
    none has used it, there is none. Called with the same parameters on every rank.
    """
    if not parameters:
        return
    group = model.process_group
    used = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device)
    used = used.to(torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size(group)
            dist.all_reduce(parameter.grad, group=group)


class RefuseUnfrozen:
    """A forward pre-hook of a model that had nothing to train when it was prepared."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters: list[torch.nn.Parameter] | None = list(model.parameters())

    def __call__(self, model: torch.nn.Module, *_: object) -> None:
        """Raise where gradients of `model` would be computed."""
        if self._parameters is None:
            self._parameters = list(model.parameters())
        if torch.is_grad_enabled() and any(map(requires_grad, self._parameters)):
            count = sum(map(requires_grad, self._parameters))
            raise ConfigError.of(
                f"{type(model).__name__}: {count} of {len(self._parameters)} parameters "
                "require gradients, and none did at prepare",
                "DDP does not wrap a model that has nothing to train, so that its gradients "
                "would not be averaged over the ranks",
                "Unfreeze it before prepare; it may be frozen again afterwards.",
            )

    def __getstate__(self) -> dict[str, object]:
        return {"_parameters": None}


class RefuseUnreduced:
    """A step pre-hook of an optimizer: looks at its first step, when all models are prepared."""

    def __init__(self, ids: Callable[[], set[int]]) -> None:
        self._ids: Callable[[], set[int]] | None = ids

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise in the first step if `optimizer` would step by gradients of this rank alone."""
        if self._ids is None:
            return
        ids, self._ids = self._ids(), None
        count = sum(id(p) in ids and p.grad is not None for p in parameters_of(optimizer))
        if count:
            raise ConfigError(unreduced(f"optimizer.step: {count} parameters"))


class WarnOfBypassed:
    """A step pre-hook of an optimizer: tells of gradients that came past a model in DDP.

    The reducer averages gradients of forward passes of the prepared model alone. What calls the
    module inside of it (``unwrap_model(model)(x)``, ``model.module.encode(x)``) and nothing else
    trains on each rank's own gradients.
    """

    def __init__(self, followers: Mapping[DistributedDataParallel, FollowTrainable]) -> None:
        self._followers: Mapping[DistributedDataParallel, FollowTrainable] | None = followers
        self._last: tuple[weakref.ref[torch.Tensor], int] | None = None
        # By model: how many groups the optimizer had, and whether any held parameters of it.
        self._held: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Warn, once, before the first such step of `optimizer`."""
        if self._followers is None:  # told already, or of a copy
            return
        for model, follower in self._followers.items():
            if not self._holds(optimizer, model):
                continue
            if follower.stepped is None or id(optimizer) in follower.stepped:
                gradients = _gradients_of(optimizer, model)
                if not self._are_of_last_step(gradients) and any(map(_is_nonzero, gradients)):
                    self._followers = None
                    warnings.warn(str(_bypassed(model, len(gradients))), stacklevel=5)
                    return
            else:
                follower.stepped = (*follower.stepped, id(optimizer))
        first = next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
        self._last = None if first is None else (weakref.ref(first), first._version)

    def _holds(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> bool:
        num_groups = len(optimizer.param_groups)
        known = self._held.get(model)
        if known is None or known[0] != num_groups:
            reduced = {id(p) for p in model.parameters()}
            known = num_groups, any(id(p) in reduced for p in parameters_of(optimizer))
            self._held[model] = known
        return known[1]

    def _are_of_last_step(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether the latest step was made by the same `gradients`."""
        if self._last is None:
            return False
        last, version = self._last
        return any(gradient is last() and gradient._version == version for gradient in gradients)

    def __getstate__(self) -> dict[str, object]:
        return {"_followers": None, "_last": None, "_held": None}


def _gradients_of(
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> list[torch.Tensor]:
    """Return the gradients by which `optimizer` would step parameters that `model` reduces."""
    names = model.parameters_to_ignore
    reduced = {id(p) for name, p in model.module.named_parameters() if name not in names}
    own = (p for p in parameters_of(optimizer) if id(p) in reduced)
    return [p.grad for p in own if p.grad is not None]


def _is_nonzero(gradient: torch.Tensor) -> bool:
    return bool(gradient.count_nonzero()) if not gradient.is_sparse else gradient._nnz() > 0


def _bypassed(model: DistributedDataParallel, count: int) -> Problem:
    name = type(model.module).__name__
    return Problem(
        f"optimizer.step: {count} gradients of {name} without a forward pass of the prepared model "
        "since the last step",
        "DDP averages gradients in its own forward and backward pass: those of "
        "unwrap_model(model)(…) and model.module.method(…) stay each rank's own, and ranks drift "
        "apart",
        "Call model(…), whose forward calls the method; or average them yourself: "
        "accelerator.reduce(p.grad, 'mean').",
    )


def unreduced(value: str) -> Problem:
    """Return the problem that no model in DDP holds what an optimizer steps."""
    return Problem(
        f"{value} of no model that DDP trains",
        "their gradients are not averaged over the ranks, so that these would drift apart",
        "Make them part of a prepared model before, and prepare it without evaluation_mode.",
    )
