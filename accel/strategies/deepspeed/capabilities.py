"""What DeepSpeed's engine does in the place of the run: windows, clipping, state dicts."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.checkpoint.optimizer_state import ParameterNames
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_plugins import active
from accel.errors import ConfigError, Problem, StateError
from accel.memory_estimate import Footprint
from accel.strategies.base import Gradients, StateIO, Sync
from accel.strategies.deepspeed import checks, loss_scale, shards, universal
from accel.strategies.deepspeed.disk import Disk
from accel.strategies.deepspeed.wrappers import DeepSpeedOptimizer

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.planning.plan import Plan


class Trained:
    """The engine that trains, as long as its optimizer lives, and the plugin that it follows.

    Args:
        plan: the resolved configuration.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._optimizer: weakref.ref[DeepSpeedOptimizer] | None = None

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The active plugin."""
        plugin = active(self._plan.plugin("deepspeed"))
        if plugin is None:
            raise StateError("No plugin of DeepSpeed is selected. Select one by its name.")
        return plugin

    def set(self, optimizer: DeepSpeedOptimizer) -> None:
        """Make this the optimizer of the engine that trains."""
        self._optimizer = weakref.ref(optimizer)

    def forget(self) -> None:
        """Have no engine that trains."""
        self._optimizer = None

    def optimizer(self) -> DeepSpeedOptimizer | None:
        """Return the optimizer of the engine that trains, None if there is none."""
        return None if self._optimizer is None else self._optimizer()

    def require_optimizer(self, what: str) -> DeepSpeedOptimizer:
        """Return the optimizer of the engine that trains.

        Raises:
            StateError: if none does.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            raise StateError(
                f"{what}: DeepSpeed trains no model yet. Prepare it, and its optimizer."
            )
        return optimizer


class DeepSpeedSync(Sync):
    """Whether a backward pass ends a window of micro-batches.

    Attributes:
        holds: contexts of `no_sync` around the current code.
    """

    holds = 0

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Let backward passes in the context not end a window of micro-batches."""
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1

    @contextlib.contextmanager
    def trigger(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the next backward end a window of micro-batches, whatever is around it."""
        before, self.holds = self.holds, 0
        try:
            yield
        finally:
            self.holds = before

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context that does nothing: processes need as many batches each."""
        warnings.warn(
            "join_uneven_inputs: DeepSpeed needs the same number of batches on every process.",
            stacklevel=4,
        )
        return contextlib.nullcontext()


class DeepSpeedGradients(Gradients):
    """Gradients are the engine's: it scales, clips and steps them.

    Args:
        trained: finds the engine.
    """

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self._trained = trained

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Let the next step clip gradients to `max_norm`; return the norm [] before.

        Raises:
            ConfigError: if the configuration clips to another norm and `max_norm` is finite, for
                another kind of norm, and for a part of the parameters.
        """
        optimizer = self._trained.require_optimizer("clip_grad_norm_")
        ConfigError.raise_if(
            checks.clip_problems(
                self._trained.plugin, optimizer, list(parameters), max_norm, norm_type
            )
        )
        if not optimizer.gradient_state.sync_gradients:  # they are not complete, nor averaged
            return torch.tensor(float(optimizer.engine.get_global_grad_norm() or 0.0))
        if max_norm != math.inf:  # the norm alone is asked for: the configuration's stays
            optimizer.clip_next_step(max_norm)
        return optimizer.gradient_norm()

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Refuse: gradients are the engine's, which clips by their norm.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            Problem(
                f"clip_grad_value_({clip_value}) under DeepSpeed",
                "its engine clips gradients by their norm alone",
                "Call clip_grad_norm_, or give DeepSpeedPlugin(gradient_clipping=…).",
            )
        )


class ZeroState(StateIO):
    """Full state dicts are gathered from the engine's fragments.

    Args:
        trained: finds the engine.
        comm: how processes talk.
        package: the module `deepspeed`.
    """

    def __init__(self, trained: Trained, comm: Communicator, package: Any) -> None:
        self._trained = trained
        self._comm, self._package = comm, package

    @property
    def sharded(self) -> tuple[str, ...]:
        """What lies in parts on several processes, in words for people."""
        kinds = ("optimizer state", "gradients", "parameters")
        return kinds[: self._trained.plugin.stage] if self._comm.world_size > 1 else ()

    def footprint(
        self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> Footprint:
        """Return the bytes that this process holds once a step is made. Exchanges nothing.

        Args:
            models: prepared.
            optimizers: prepared.
        """
        held = [parameter for model in models for parameter in model.parameters()]
        return shards.footprint(held, [o for o in optimizers if isinstance(o, DeepSpeedOptimizer)])

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole model's tensors by parameter name, trained ones in fp32.

        Called on every rank.
        """
        module = self.unwrap(model)
        with Disk(model) as disk:
            return shards.model_state(module, self._pieces(model), self._gather, self._comm, disk)

    def load_model_state(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], strict: bool = True
    ) -> None:
        """Load what `model_state` returned, from any backend and world size."""
        module = self.unwrap(model)
        with Disk(model) as disk:
            where = self._pieces(model)
            shards.load_model_state(module, state, where, self._write, strict, disk)

    def optimizer_state(self, optimizer: Any, names: ParameterNames) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, in whole tensors. Called on every rank."""
        engine, groups = optimizer.engine, optimizer.groups
        where = shards.pieces(engine)
        inner = getattr(optimizer, "optimizer", optimizer)
        with Disk(engine) as disk:
            extra = loss_scale.scale_state(engine)
            return shards.optimizer_state(inner, groups, where, names, self._comm, disk, extra)

    def load_optimizer_state(
        self, optimizer: Any, state: dict[str, Any], names: ParameterNames
    ) -> None:
        """Load what `optimizer_state` returned, from any backend and world size."""
        engine, groups = optimizer.engine, optimizer.groups
        inner = getattr(optimizer, "optimizer", optimizer)
        with Disk(engine) as disk:
            shards.load_optimizer_state(inner, groups, shards.pieces(engine), state, names, disk)
        loss_scale.load_scale_state(engine, state["extra"])
        engine.optimizer._hp_optimizer_states_linked = False

    def _pieces(self, model: Any) -> dict[int, shards.Piece]:
        optimizer = self._trained.optimizer()
        if optimizer is None or optimizer.engine is not model:
            return {}
        return shards.pieces(model)

    def _gather(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        with self._package.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()

    def _write(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
        if not hasattr(parameter, "ds_id"):
            with torch.no_grad():
                parameter.copy_(whole)
            return
        with self._package.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if self._comm.rank == 0:
                parameter.copy_(whole)


class UniversalCheckpoint:
    """DeepSpeed's universal checkpoint.

    Args:
        trained: finds the engine.
        comm: how processes talk.
    """

    def __init__(self, trained: Trained, comm: Communicator) -> None:
        self._trained = trained
        self._comm = comm

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        """Write a universal checkpoint of DeepSpeed. Called on every rank."""
        universal.save(model, folder, self._comm.rank == 0)

    def load(self, model: torch.nn.Module, folder: Path) -> None:
        """Read a universal checkpoint of DeepSpeed, which can run code. Called on every rank."""
        universal.load(model, folder)
        optimizer = self._trained.require_optimizer("load_native")
        optimizer.clip_next_step(optimizer.clipping)  # the checkpoint brought its own
