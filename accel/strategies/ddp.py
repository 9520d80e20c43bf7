"""DistributedDataParallel: every process holds the whole model and a part of each batch.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accel.config.handlers import DistributedDataParallelKwargs
from accel.machine.enums import DDPCommunicationHookType as Hook
from accel.machine.errors import ConfigError, Problem, nearest
from accel.optimizer import unwrap_optimizer
from accel.strategies.base import Gradients, Strategy, Sync
from accel.strategies.ddp_rebuild import (
    FollowTrainable,
    RefuseUnfrozen,
    RefuseUnreduced,
    WarnOfBypassed,
    unreduced,
)
from accel.strategies.objects import Objects

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.precision.base import Precision


CommHook = Callable[..., torch.futures.Future[torch.Tensor]]


def _renamed(hook: CommHook) -> CommHook:
    """Return `hook` under another name: torch refuses bf16 by name without a GPU; gloo can."""
    return lambda state, bucket: hook(state, bucket)


HOOKS: dict[Hook, CommHook] = {
    Hook.NO: default_hooks.allreduce_hook,
    Hook.FP16: default_hooks.fp16_compress_hook,
    Hook.BF16: _renamed(default_hooks.bf16_compress_hook),
    Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
    Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
WRAPPERS: dict[Hook, Callable[[CommHook], CommHook]] = {
    Hook.FP16: default_hooks.fp16_compress_wrapper,
    Hook.BF16: lambda hook: _renamed(default_hooks.bf16_compress_wrapper(hook)),
}
POWER_SGD = (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD)
# What lets the reducers of models follow the parameters that are trained.
_FOLLOWERS: weakref.WeakKeyDictionary[DistributedDataParallel, FollowTrainable] = (
    weakref.WeakKeyDictionary()
)
_NUMBERS = itertools.count()  # of strategies
HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


class DDPSync(Sync):
    """Gradients are reduced where a window of micro-batches ends; ranks may run out of batches."""

    joins_uneven = True

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel) and _knows_its_graph(model):
            return model.no_sync()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def trigger(self, model: torch.nn.Module) -> Iterator[None]:
        """Reduce gradients in the next backward, though the forward ran under `no_sync`.

        Raise `ConfigError` with `find_unused_parameters`, which needs the outputs of the forward.
        """
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        if model.find_unused_parameters:
            raise ConfigError.of(
                "trigger_sync_in_backward with find_unused_parameters=True",
                "unused parameters are looked for in a forward pass that synchronises",
                "Run the last forward pass outside of no_sync.",
            )
        _follow(model)
        _FOLLOWERS[model].check(model)
        before = model.require_backward_grad_sync
        model.require_backward_grad_sync = True
        # As a forward outside of no_sync: the reducer waits for every parameter's gradient.
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync = before

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context in which ranks that run out of batches shadow the others.

        Raise `ConfigError` if there is nothing to join, or something that cannot be joined.

        Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
        """
        own: list[Any] = [unwrap_optimizer(joinable) for joinable in joinables]
        ConfigError.raise_if(_join_problems(own))
        return Join(own)


class DDPGradients(Gradients):
    """Gradients are those of parameters that a reducer knows."""

    def admit(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        entries = list(parameters)
        reduced = _reduced_ids()
        own = [p for p in entries if id(p) not in reduced and not hasattr(p, "_ddp_ignored")]
        if own:
            raise ConfigError(unreduced(f"add_param_group: {len(own)} parameters"))
        return entries


@final
class DDPStrategy(Strategy):
    """Each rank holds the full model; gradients are averaged while they are computed."""

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        self.sync = DDPSync()
        self.gradients = DDPGradients(self.gradients.scaler)
        self._number = next(_NUMBERS)
        # Models that no reducer knows: they are only evaluated, or had nothing to train.
        self._unreduced: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        comm.before_exit(_detach_all)

    def prepare(
        self, objects: Objects, placement: Objects, prepared: Objects, evaluation: bool = False
    ) -> Objects:
        if objects.models:
            ConfigError.raise_if(_hook_problems(self.plan.ddp, self.device))
        return super().prepare(objects, placement, prepared, evaluation)

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` in DDP, unless it is one already, or has nothing to train."""
        if isinstance(model, DistributedDataParallel):
            _follow(model)
            return model
        model = super().wrap_model(model, place, evaluation)
        if evaluation or not any(parameter.requires_grad for parameter in model.parameters()):
            self._unreduced.add(model)
            if not evaluation:
                model.register_forward_pre_hook(RefuseUnfrozen(model))
            return model
        handler = self.plan.ddp
        arguments = {k: v for k, v in handler.to_kwargs().items() if k not in HOOK_FIELDS}
        wrapped = DistributedDataParallel(model, device_ids=_device_ids(model), **arguments)
        register_hook(wrapped, handler)
        _follow(wrapped, self._number)
        return wrapped

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return `optimizer`, which refuses, or warns of, gradients that are not averaged."""
        own = unwrap_optimizer(optimizer)
        own.register_step_pre_hook(RefuseUnreduced(self._unreduced_ids))
        own.register_step_pre_hook(WarnOfBypassed(_FOLLOWERS))
        return super().wrap_optimizer(optimizer, place)

    def _unreduced_ids(self) -> set[int]:
        """Return the ids of the parameters of prepared models whose gradients nobody averages."""
        if not self._unreduced:
            return set()
        return {id(p) for model in self._unreduced for p in model.parameters()} - _reduced_ids()

    def close(self) -> None:
        """Take the reducers from the models, so that no thread of theirs outlives the group."""
        super().close()
        for model, owner in _wrapped_here():
            if owner == self._number:
                _detach(model)


def _reduced_ids() -> set[int]:
    return {id(p) for model in _FOLLOWERS for p in model.parameters()}


def _device_ids(model: torch.nn.Module) -> list[torch.device] | None:
    """Return the one accelerator that the model lies on, or None (CPU, or several)."""
    devices = {parameter.device for parameter in model.parameters()}
    single = devices.pop() if len(devices) == 1 else None
    return None if single is None or single.type == "cpu" else [single]


def _follow(model: DistributedDataParallel, owner: int | None = None) -> None:
    if model not in _FOLLOWERS:
        _FOLLOWERS[model] = FollowTrainable(model, owner)
        model.register_forward_pre_hook(_FOLLOWERS[model])


def _knows_its_graph(model: DistributedDataParallel) -> bool:
    """Return whether `model` may leave gradients alone: a static graph is first recorded.

    torch records it in a backward that synchronises, and fails if none came before. The gradients
    of that first micro-batch are averaged at once; averaging them again with the window's changes
    nothing, because they are then the same on every process.
    """
    return not model.static_graph or model._static_graph_delay_allreduce_enqueued


def _detach(model: DistributedDataParallel) -> None:
    """Let go of the process group in `model`, whose forward is from now on that of its module.

    gloo's threads end with the last reference to the group. Where that is dropped later, as with a
    model, the process aborts, or waits for ever for a thread that waits for the interpreter.
    """
    model.forward = model.module.forward  # type: ignore[method-assign]
    model._comm_hooks.clear()
    for name in ("reducer", "logger", "process_group"):
        delattr(model, name)


def _detach_all() -> None:
    for model, _ in _wrapped_here():
        _detach(model)


def _wrapped_here() -> list[tuple[DistributedDataParallel, int]]:
    """Return the models in DDP that strategies wrapped, and copies of them, with whose they are.

    Those that hold the process group; a model that the user wrapped stays as it is.
    """
    models = [found for found in gc.get_objects() if type(found) is DistributedDataParallel]
    return [
        (model, hook.owner)
        for model in models
        if "reducer" in model.__dict__
        for hook in model._forward_pre_hooks.values()
        if type(hook) is FollowTrainable and hook.owner is not None
    ]


def _join_problems(joinables: Sequence[object]) -> list[Problem]:
    rule = "what takes part is a model that DDP trains, or a ZeroRedundancyOptimizer"
    remedy = "Give the prepared models: join_uneven_inputs([model])."
    if not joinables:
        return [Problem("join_uneven_inputs([])", rule, remedy)]
    return [
        Problem(f"join_uneven_inputs: {type(entry).__name__} at position {index}", rule, remedy)
        for index, entry in enumerate(joinables)
        if not isinstance(entry, Joinable)
    ]


def register_hook(model: DistributedDataParallel, handler: DistributedDataParallelKwargs) -> None:
    """Give `model` the communication hook that `handler` names."""
    if handler.comm_hook == Hook.NO and handler.comm_wrapper == Hook.NO:
        return
    hook = HOOKS[handler.comm_hook]
    if handler.comm_wrapper != Hook.NO:
        hook = WRAPPERS[handler.comm_wrapper](hook)
    state = None
    if handler.comm_hook in POWER_SGD:
        state = powerSGD_hook.PowerSGDState(None, **handler.comm_state_option)
    model.register_comm_hook(state, hook)


def _batched_hook_works(device: torch.device) -> bool:
    """Return whether torch's batched PowerSGD hook can reduce a bucket [4]; every rank calls this.

    That of torch 2.13 fails: it passes one matrix to a function that takes several.
    """
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    state.iter = state.start_powerSGD_iter
    buffer = torch.ones(4, device=device)
    bucket: Any = SimpleNamespace(buffer=lambda: buffer, index=lambda: 0, is_last=lambda: True)
    try:
        powerSGD_hook.batched_powerSGD_hook(state, bucket).wait()
    except AssertionError:  # before the first collective, on every rank
        return False
    return True


def _hook_problems(handler: DistributedDataParallelKwargs, device: torch.device) -> list[Problem]:
    hook = str(handler.comm_hook)
    if handler.comm_hook == Hook.BATCHED_POWER_SGD and not _batched_hook_works(device):
        rule = f"the batched PowerSGD hook of torch {torch.__version__} fails on every bucket"
        return [Problem(f"comm_hook={hook!r}", rule, "Use comm_hook='power_sgd'.")]
    if not handler.comm_state_option:
        return []
    if handler.comm_hook not in POWER_SGD:
        return [
            Problem(
                f"comm_state_option={handler.comm_state_option!r} with comm_hook={hook!r}",
                f"only {' and '.join(POWER_SGD)} have a state",
                "Leave comm_state_option empty, or choose one of these hooks.",
            )
        ]
    known = list(inspect.signature(powerSGD_hook.PowerSGDState).parameters)[1:]
    strange = [name for name in handler.comm_state_option if name not in known]
    if strange:
        rule = f"{handler.comm_hook} has none"
        return [Problem(f"comm_state_option[{n!r}]", rule, nearest(n, known)) for n in strange]
    try:
        powerSGD_hook.PowerSGDState(None, **handler.comm_state_option)
    except ValueError as error:
        value = f"comm_state_option={handler.comm_state_option!r}"
        return [Problem(value, f"torch refuses it: {error}", "Change the option that it names.")]
    return []
