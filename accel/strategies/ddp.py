"""DistributedDataParallel: every process holds the whole model and a part of each batch.

DDP decides once, when it wraps a model, whose gradients it reduces. A layer that is unfrozen later
would train on each rank's own gradients, without an error. So each forward pass with gradients
compares the trainable parameters with those that DDP knows, and raises if they differ. Preparing
the model again wraps it again.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import contextlib
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
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accel.config.handlers import DistributedDataParallelKwargs
from accel.machine.enums import DDPCommunicationHookType as Hook
from accel.machine.errors import ConfigError, Problem
from accel.optimizer import unwrap_optimizer
from accel.state import GradientState
from accel.strategies.base import Gradients, Objects, Strategy, Sync
from accel.strategies.trainable_changes import Trainable

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
        if model in _COMPARED:
            _COMPARED[model].check(model)
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

        Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
        """
        own: list[Any] = [unwrap_optimizer(joinable) for joinable in joinables]
        return Join(own)


class CompareTrainable:
    """Forward pre-hook that raises if other parameters train than those that DDP knows.

    Copies of a model have a copy of it, which compares the copy's own parameters.

    Attributes:
        known: the parameters at `prepare`.
        is_ours: whether the strategy wrapped the model; otherwise the user did.
    """

    def __init__(self, module: torch.nn.Module, is_ours: bool = True) -> None:
        self.known = Trainable(module)
        self.is_ours = is_ours

    def __call__(self, model: torch.nn.Module, *_: object) -> None:
        """Compare before a forward pass of `model` with gradients."""
        if torch.compiler.is_compiling():
            return
        if isinstance(model, DistributedDataParallel):
            if not _is_attached(model):
                return
            _COMPARED.setdefault(model, self)  # a copy
        if torch.is_grad_enabled():
            self.check(model)

    def check(self, model: torch.nn.Module) -> None:
        """Raise `ConfigError` if parameters were frozen, unfrozen, added or replaced."""
        # A model may be frozen as a whole for a while, as a discriminator in the generator's step:
        # nothing is reduced then.
        if self.known.changed() and any(p.requires_grad for p in model.parameters()):
            inside = model.module if isinstance(model, DistributedDataParallel) else model
            raise ConfigError.of(
                f"{type(inside).__name__}: parameters that were frozen, unfrozen, added or "
                "replaced after prepare",
                "DDP averages the gradients of the parameters that required gradients when it "
                "wrapped the model",
                "Prepare the model again after the change, between two optimizer steps: "
                "model = accelerator.prepare(model).",
            )


# Models in DDP, and what compares their parameters.
_COMPARED: weakref.WeakKeyDictionary[DistributedDataParallel, CompareTrainable] = (
    weakref.WeakKeyDictionary()
)


class DDPGradients(Gradients):
    """Gradients are those of parameters that a reducer knows."""

    def admit(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        entries = list(parameters)
        known = {id(p) for model in _COMPARED for p in model.parameters()}
        own = [p for p in entries if id(p) not in known and not hasattr(p, "_ddp_ignored")]
        if own:
            raise ConfigError.of(
                f"add_param_group: {len(own)} parameters of no model that DDP trains",
                "their gradients are not averaged over the ranks, which would drift apart",
                "Make them part of a prepared model before, and prepare it without "
                "evaluation_mode.",
            )
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
        comm.before_exit(_detach)

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
            _compare(model, is_ours=False)
            return model
        model = super().wrap_model(model, place, evaluation)
        if evaluation:
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            model.register_forward_pre_hook(CompareTrainable(model))
            return model
        wrapped = DistributedDataParallel(model, **self._arguments(model))
        register_hook(wrapped, self.plan.ddp)
        _compare(wrapped, is_ours=True)
        return wrapped

    def wrap_again(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap `model` again, in place, if other parameters train than those that DDP knows.

        A model that had nothing to train returns in DDP. Every rank calls this.
        """
        trains = any(p.requires_grad for p in model.parameters())
        hooks = model._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, CompareTrainable)]:
            if trains and not isinstance(model, DistributedDataParallel):  # it had nothing to train
                del hooks[key]
                return self.wrap_model(model, place=False)
        if not isinstance(model, DistributedDataParallel) or model not in _COMPARED:
            return model
        compared = _COMPARED[model]
        # What is frozen as a whole has nothing to reduce.
        if compared.known.changed() and trains:
            _check_again(model, compared.is_ours)
            self._rebuild(model)
            compared.known = Trainable(model.module)
        return model

    def _rebuild(self, model: DistributedDataParallel) -> None:
        """Construct `model` anew in place, so that all references to it stay valid."""
        hooks = list(model._comm_hooks)
        kept = {name: vars(model)[name] for name in vars(torch.nn.Module())}  # hooks, and the mode
        DistributedDataParallel.__init__(model, model.module, **self._arguments(model.module))
        vars(model).update(kept)
        register_hook(model, self.plan.ddp)
        for hook, state in () if model._comm_hooks else hooks:  # the user's
            model.register_comm_hook(state, hook)

    def _arguments(self, model: torch.nn.Module) -> dict[str, Any]:
        given = self.plan.ddp.to_kwargs()
        own = {name: value for name, value in given.items() if name not in HOOK_FIELDS}
        return {**own, "device_ids": _device_ids(model)}

    def close(self) -> None:
        """Remove the reducers of all models, so that no thread of theirs outlives the group."""
        super().close()
        _detach()


def _detach() -> None:
    """Remove the process group from models that we wrapped, and from copies of them.

    Their `forward` is then that of their module. gloo's threads end with the last reference to the
    group. If a model drops it later, the process aborts, or waits for ever for a thread that waits
    for the interpreter.
    """
    for model, compared in list(_COMPARED.items()):
        if compared.is_ours and _is_attached(model):
            model.forward = model.module.forward  # type: ignore[method-assign]
            model._comm_hooks.clear()
            for name in ("reducer", "logger", "process_group"):
                delattr(model, name)


def _is_attached(model: DistributedDataParallel) -> bool:
    return "reducer" in vars(model)


def _compare(model: DistributedDataParallel, is_ours: bool) -> None:
    if model not in _COMPARED:
        _COMPARED[model] = CompareTrainable(model.module, is_ours)
        model.register_forward_pre_hook(_COMPARED[model])


def _check_again(model: DistributedDataParallel, is_ours: bool) -> None:
    """Raise `ConfigError` if `model` cannot be wrapped again here."""
    value = f"prepare: {type(model.module).__name__} again, whose trainable parameters changed"
    if not is_ours:
        rule = "you wrapped it in DistributedDataParallel"
        remedy = "Wrap its module again, and prepare that."
        raise ConfigError.of(value, rule, remedy)
    if not GradientState().sync_gradients:
        rule = "gradients of this window of accumulation are not averaged yet"
        raise ConfigError.of(value, rule, "Change parameters between two optimizer steps.")


def _device_ids(model: torch.nn.Module) -> list[torch.device] | None:
    """Return the one accelerator that the model is on, or None (CPU, or several)."""
    devices = {parameter.device for parameter in model.parameters()}
    single = devices.pop() if len(devices) == 1 else None
    return None if single is None or single.type == "cpu" else [single]


def _knows_its_graph(model: DistributedDataParallel) -> bool:
    """Return whether `model` may leave gradients alone: a static graph is first recorded.

    torch records it in a backward that synchronises, and fails if none came before. The gradients
    of that first micro-batch are averaged at once; averaging them again with the window's changes
    nothing, because they are then the same on every process.
    """
    return not model.static_graph or model._static_graph_delay_allreduce_enqueued


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
    return []
