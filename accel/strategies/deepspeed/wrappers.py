"""Optimizers and schedulers under DeepSpeed: placeholders before `prepare`, wrappers after it.

A placeholder stands for the optimizer or scheduler that DeepSpeed's configuration describes. A
wrapper is what `prepare` returns; the engine makes its step.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from accel.config.deepspeed import DeepSpeedPlugin, active
from accel.config.deepspeed_json import AUTO, value_at
from accel.machine.errors import ConfigError, Problem, Problems, StateError
from accel.optimizer import AcceleratedOptimizer
from accel.scheduler import AcceleratedScheduler
from accel.strategies.base import Gradients, Sync
from accel.strategies.trainable_changes import Trainable

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from accel.plan.plan import Plan


def _refuse_unprepared(name: str) -> NoReturn:
    raise StateError(
        f"{name} is a placeholder for DeepSpeed's configuration, and was not prepared with "
        "DeepSpeed. Switch it on with deepspeed_plugin=…, or build one of torch."
    )


@final
class DummyOptim(torch.optim.Optimizer):
    """Placeholder for the optimizer that the section ``optimizer`` of the configuration describes.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, where the configuration has none or ``"auto"``; another number there is
            refused, unless this is the default.
        weight_decay: weight decay, likewise.
        kwargs: further values of ``optimizer.params``, which the configuration may not contradict.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: object,
    ) -> None:
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs
        self.params = list(params)
        # The base class writes its defaults into groups, where the configuration has its own.
        groups = [dict(g) if isinstance(g, Mapping) else g for g in self.params]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @property
    def values(self) -> dict[str, object]:
        """All values of ``optimizer.params``, by name."""
        return {"lr": self.lr, "weight_decay": self.weight_decay, **self.kwargs}

    @property
    def defaulted(self) -> set[str]:
        """The names of values that equal their defaults: the configuration overrides them."""
        defaults = {"lr": 0.001, "weight_decay": 0}
        return {name for name, value in defaults.items() if self.values[name] == value}

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        """Refuse: only what `prepare` returns can step.

        Args:
            closure: not used.

        Raises:
            StateError: always.
        """
        _refuse_unprepared("DummyOptim")


@final
class DummyScheduler:
    """Placeholder for the scheduler that the section ``scheduler`` of the configuration describes.

    Args:
        optimizer: the optimizer, or its `DummyOptim`.
        total_num_steps: optimizer steps until the end of the schedule, whatever the number of
            processes: DeepSpeed makes one step of it with each.
        warmup_num_steps: likewise, until the full learning rate.
        lr_scheduler_callable: builds the scheduler from the optimizer; overrides the configuration.
        kwargs: further values of ``scheduler.params``, which the configuration may not contradict.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[torch.optim.Optimizer], object] | None = None,
        **kwargs: object,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, *args: object, **kwargs: object) -> None:
        """Refuse: only what `prepare` returns can step.

        Args:
            args: not used.
            kwargs: not used.

        Raises:
            StateError: always.
        """
        _refuse_unprepared("DummyScheduler")

    def state_dict(self) -> dict[str, object]:
        """Return an empty dict: there is no schedule yet."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Refuse: only what `prepare` returns has a state.

        Args:
            state_dict: not used.

        Raises:
            StateError: always.
        """
        _refuse_unprepared("DummyScheduler")


# -- wrappers ------------------------------------------------------------------------------


@final
class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer that an engine steps, as `prepare` returns it.

    Args:
        engine: steps it.
        groups: the parameters of each group at `prepare`.
        given: the optimizer that `prepare` was given.

    Attributes:
        engine: steps it.
        groups: as above.
        step_was_skipped: whether the last step was skipped because gradients overflowed.
        trainable: the trainable parameters of the model at `prepare`.
        clipping: the maximum norm of gradients in the configuration; 0: not clipped.
        window_ended: whether the gradients of a complete window await the step.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        groups: list[list[torch.nn.Parameter]],
        given: torch.optim.Optimizer,
    ) -> None:
        self.engine = engine
        self.groups = groups
        self.window_ended = False
        self.clipping = float(engine.gradient_clipping())
        inner = getattr(engine.optimizer, "optimizer", engine.basic_optimizer)
        if inner is not engine.basic_optimizer:  # Adagrad is rebuilt, in one group of defaults
            inner.param_groups = engine.basic_optimizer.param_groups
        self._given = weakref.ref(given)
        self.trainable = Trainable(engine.module)
        super().__init__(inner, device_placement=False)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Let the engine update the parameters if a window of micro-batches is complete."""
        if closure is not None:
            raise ConfigError.of(
                "optimizer.step(closure) under DeepSpeed",
                "its engine makes the step, and calls no closure",
                "Use an optimizer that takes no closure.",
            )
        if not self.gradient_state.sync_gradients:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        self.window_ended = False
        self.step_was_skipped = not self.engine.was_step_applied()
        self.set_clipping(self.clipping)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients if a window is complete; the engine's step does, too."""
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()
            if self.engine.optimizer is not self.optimizer:
                self.engine.optimizer.zero_grad()
            self.window_ended = False

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Refuse: the engine steps the parameters that it was built with."""
        raise ConfigError.of(
            "add_param_group under DeepSpeed",
            "its engine steps the parameters that require gradients at prepare",
            "Give the optimizer all groups before prepare; a rate of 0 leaves one as it is.",
        )

    def attach(self, scheduler: Any) -> None:
        """Let a scheduler of the optimizer given to `prepare` set the live learning rates.

        Args:
            scheduler: of torch, or like one.
        """
        given = self._given()
        built_on = getattr(scheduler, "optimizer", None)
        if given is None or built_on is not given or given is self.optimizer:
            return
        if isinstance(given, DummyOptim):
            self._take_rates(given, type(scheduler).__name__)
        # torch's check of the call order needs `step` marked, which a new scheduler does; that also
        # sets the rates to their initial ones, with which a warm-up does not begin.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.optimizer = self.optimizer
        for part in getattr(scheduler, "_schedulers", ()):
            part.optimizer = self.optimizer

    def _take_rates(self, given: DummyOptim, name: str) -> None:
        rates = given.lr, self.optimizer.defaults["lr"]
        if rates[0] != rates[1]:
            raise ConfigError.of(
                f"{name} on DummyOptim(lr={rates[0]!r}), and the engine's is {rates[1]!r}",
                "a schedule starts from the rate of the optimizer that it was built on",
                'Write "auto" for optimizer.params.lr, or make them equal.',
            )
        for live, group in zip(self.optimizer.param_groups, given.param_groups, strict=True):
            live.update({name: group[name] for name in ("lr", "initial_lr") if name in group})

    def set_clipping(self, max_norm: float) -> None:
        """Let the next step clip gradients.

        Args:
            max_norm: their largest norm; 0: they are not clipped.
        """
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm [] of the gradients of the next step. Called on every rank.

        Infinite under stages 1 to 3 if a gradient is not finite: the step will be skipped.
        """
        optimizer = self.engine.optimizer
        scale = float(getattr(optimizer, "cur_scale", None) or 1.0)
        if hasattr(optimizer, "loss_scale"):
            scale = float(optimizer.loss_scale)
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            norms = [torch.as_tensor(norm).float() for norm in optimizer._get_norm_groups()]
            groups = torch.stack(norms)
            not_finite = (groups < 0).any()  # DeepSpeed's mark
            return torch.where(not_finite, math.inf, torch.linalg.vector_norm(groups)) / scale
        if hasattr(optimizer, "scaled_global_norm"):
            return torch.as_tensor(optimizer.scaled_global_norm()) / scale
        if hasattr(optimizer, "get_grads_for_norm"):  # bf16 accumulated in fp32
            gradients = optimizer.get_grads_for_norm(for_clipping=True)
        else:
            weights = self.engine.module.parameters()
            gradients = [p.grad for p in weights if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) / scale


@final
class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps with its optimizer.

    Args:
        scheduler: of the engine.
        optimizers: the prepared optimizer.
    """

    def __init__(self, scheduler: Any, optimizers: DeepSpeedOptimizerWrapper) -> None:
        super().__init__(scheduler, optimizers, split_batches=True)

    def step(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the engine stepped it with the optimizer.

        Args:
            args: not used.
            kwargs: not used.
        """


def scaled(engine: DeepSpeedEngine, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss [], times the scale of fp16 where the engine only divides by it.

    From the version on that has `DeepSpeedEngine.scale`, `backward` multiplies losses under its
    ZeRO optimizers alone: gradients of stage 0 were 65,536 times too small.
    Source: deepspeed/runtime/engine.py, `backward`; deepspeed/runtime/fp16/unfused_optimizer.py
    """
    if not hasattr(engine, "scale") or not engine.fp16_enabled():
        return loss
    if hasattr(engine.optimizer, "scale_if_loss"):
        return loss
    return loss.float() * engine.optimizer.loss_scale


class DeepSpeedEngineWrapper:
    """An engine of DeepSpeed whose backward pass makes the step, too, for loops by hand.

    `prepare` returns the engine itself, and `Accelerator.backward` leaves the step to the prepared
    optimizer.

    Args:
        engine: of DeepSpeed.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: bool) -> None:
        """Compute gradients, and let the engine step where a window of micro-batches ends.

        Args:
            loss: [] of a micro-batch.
            sync_gradients: whether the micro-batch is the last of its window.
            kwargs: of the engine's `backward`.
        """
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(scaled(self.engine, loss), **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step; None before the first."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


@final
class TrainedEngine:
    """The engine that trains, for as long as its optimizer lives, and the active plugin."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._optimizer: weakref.ref[DeepSpeedOptimizerWrapper] | None = None

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The active plugin; `StateError`: none is selected."""
        plugin = active(self._plan.plugin("deepspeed"))
        if plugin is None:
            raise StateError("No DeepSpeed plugin is selected. Select one by its name.")
        return plugin

    def set(self, optimizer: DeepSpeedOptimizerWrapper | None) -> None:
        """Set the optimizer of the engine that trains; None: no engine trains."""
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def optimizer(self) -> DeepSpeedOptimizerWrapper | None:
        """Return the optimizer of the engine that trains, or None."""
        return None if self._optimizer is None else self._optimizer()

    def require_optimizer(self, call: str) -> DeepSpeedOptimizerWrapper:
        """Return the optimizer of the engine that trains, or raise `StateError` with `call`."""
        optimizer = self.optimizer()
        if optimizer is None:
            raise StateError(
                f"{call}: DeepSpeed trains no model yet. Prepare a model with its optimizer."
            )
        return optimizer


@final
class DeepSpeedSync(Sync):
    """Whether a backward pass ends a window of micro-batches: not in contexts of `no_sync`."""

    def __init__(self) -> None:
        self.num_no_sync = 0

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Let backward passes in the context not end a window of micro-batches."""
        self.num_no_sync += 1
        try:
            yield
        finally:
            self.num_no_sync -= 1

    @contextlib.contextmanager
    def trigger(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the next backward pass end a window of micro-batches, also under `no_sync`."""
        before, self.num_no_sync = self.num_no_sync, 0
        try:
            yield
        finally:
            self.num_no_sync = before

    def join(self, joinables: Sequence[object]) -> AbstractContextManager[None]:
        """Return a context without effect, with a warning: DeepSpeed needs even inputs."""
        warnings.warn(
            "join_uneven_inputs: DeepSpeed needs the same number of batches on every process.",
            stacklevel=4,
        )
        return contextlib.nullcontext()


@final
class DeepSpeedGradients(Gradients):
    """Clipping of gradients by the engine, which also scales the loss."""

    def __init__(self, trained: TrainedEngine) -> None:
        super().__init__()
        self._trained = trained

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Let the next step clip gradients to `max_norm`; return the norm [] before.

        Raise `ConfigError` if the configuration clips to another norm and `max_norm` is finite, for
        another kind of norm, and for a subset of the parameters.
        """
        optimizer = self._trained.require_optimizer("clip_grad_norm_")
        given = list(parameters)
        ConfigError.raise_if(
            _clip_problems(self._trained.plugin, optimizer, given, max_norm, norm_type)
        )
        if not optimizer.gradient_state.sync_gradients:  # neither complete nor averaged
            return torch.tensor(float(optimizer.engine.get_global_grad_norm() or 0.0))
        if max_norm != math.inf:  # else only the norm is requested
            optimizer.set_clipping(max_norm)
        return optimizer.gradient_norm()

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Refuse: DeepSpeed supports norm clipping only."""
        raise ConfigError.of(
            f"clip_grad_value_({clip_value}) under DeepSpeed",
            "DeepSpeed supports norm clipping only",
            "Call clip_grad_norm_, or give DeepSpeedPlugin(gradient_clipping=…).",
        )


def _clip_problems(
    plugin: DeepSpeedPlugin,
    optimizer: DeepSpeedOptimizerWrapper,
    parameters: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
) -> list[Problem]:
    call, problems = f"clip_grad_norm_(…, {max_norm})", Problems()
    is_open = value_at(plugin.stated_config(), "gradient_clipping") == AUTO
    if optimizer.clipping not in (0.0, float(max_norm)) and max_norm != math.inf and not is_open:
        source = f"{plugin.place}: gradient_clipping={optimizer.clipping}"
        if plugin.given("gradient_clipping") is not None:
            source = plugin.source("gradient_clipping")
        rule = "given in two places with different values"
        remedy = 'Make them equal, or write "auto" for gradient_clipping.'
        problems.add(f"{call} with {source}", rule, remedy)
    if norm_type != 2:
        rule = "DeepSpeed clips by the norm of order 2"
        problems.add(f"{call[:-1]}, norm_type={norm_type})", rule, "Remove it.")
    given = {id(parameter) for parameter in parameters}
    trained = (p for p in optimizer.engine.module.parameters() if p.requires_grad)
    num_missing = sum(id(parameter) not in given for parameter in trained)
    if num_missing:
        rule = f"DeepSpeed clips all parameters together, and {num_missing} of them are missing"
        problems.add(call, rule, "Give model.parameters().")
    return problems


# An option of the engine that is off in every backward pass: losses are divided before, unless the
# caller says with it that they are.
SCALES = "scale_wrt_gas"


def backward_problems(
    optimizer: DeepSpeedOptimizerWrapper, options: Mapping[str, object]
) -> list[Problem]:
    """Return the reasons why a backward pass would compute wrong gradients."""
    stage = optimizer.engine.zero_optimization_stage()
    problems = Problems(
        Problem(
            f"backward({name}=…) under DeepSpeed",
            "its engine supports retain_graph only",
            "Remove it.",
        )
        for name in options
        if name != "retain_graph" and (name != SCALES or options[name])
    )
    if optimizer.trainable.changed():
        problems.add(
            "backward after parameters were frozen, unfrozen or replaced under DeepSpeed",
            "its engine steps the parameters that required gradients at prepare",
            "Set requires_grad before prepare. To change it during training: save_state, "
            "rebuild model and Accelerator(), prepare, load_state.",
        )
    if options.get("retain_graph") and stage == 3:
        problems.add(
            "backward(retain_graph=True) under ZeRO 3",
            "stage 3 frees parameters in the backward pass, and a second one needs them",
            "Sum the losses, and call backward once.",
        )
    if optimizer.window_ended and stage in (1, 2):
        problems.add(
            f"a second backward before optimizer.step under ZeRO {stage}",
            "it would overwrite the gradients of the first one",
            "Sum the losses, put `with accelerator.no_sync(model):` around all but the last, "
            "or drop the first one's gradients with optimizer.zero_grad().",
        )
    return problems
