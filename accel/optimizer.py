"""The optimizer as `prepare` returns it: it steps only where a window of micro-batches ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.machine.errors import ConfigError
from accel.precision.amp import StepScaler, step_unless_overflow
from accel.state import AcceleratorState, GradientState


def _of_wrapped(name: str) -> Any:
    """Return the property of an attribute of the wrapped optimizer."""

    def read(own: AcceleratedOptimizer) -> Any:
        return getattr(own.optimizer, name)

    def write(own: AcceleratedOptimizer, value: object) -> None:
        setattr(own.optimizer, name, value)

    return property(read, write)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose `step` and `zero_grad` do nothing while gradients are accumulated.

    Everything else is the wrapped optimizer's own.

    Args:
        optimizer: the optimizer to wrap.
        device_placement: whether state that the optimizer brings along is moved to the device of
            its parameters.
        scaler: the gradient scaler of fp16 training, or None.
        admit: returns the parameters to step for added ones; None: those themselves.

    Attributes:
        step_was_skipped: whether the last step was skipped because gradients overflowed (fp16).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        admit: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self._admit = admit
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        self.step_was_skipped = False
        if isinstance(scaler, StepScaler):
            scaler.register(optimizer)
        if device_placement:
            self._place_state()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state that this process was set up with."""
        return AcceleratorState()

    state: Any = _of_wrapped("state")
    """The wrapped optimizer's state by parameter."""

    param_groups: list[dict[str, Any]] = _of_wrapped("param_groups")
    """The wrapped optimizer's parameter groups."""

    defaults: dict[str, Any] = _of_wrapped("defaults")
    """The wrapped optimizer's default options."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters if gradients are complete.

        Args:
            closure: computes the loss again; not under fp16.

        Returns:
            The result of the wrapped optimizer; None where the step was skipped.

        Raises:
            ConfigError: for a closure under fp16.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if self.scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is not None and self.scaler.is_enabled():
            raise ConfigError.of(
                "optimizer.step(closure) with mixed_precision='fp16'",
                "a closure cannot be called again under a gradient scaler",
                "Use mixed_precision='bf16', or an optimizer that needs no closure.",
            )
        self.step_was_skipped = step_unless_overflow(self.scaler, self.optimizer)
        return None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients if a window of micro-batches is complete.

        Args:
            set_to_none: whether gradients become None and not zeros; None: torch's default.
        """
        if not self.gradient_state.sync_gradients:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: ``params`` and the options that differ from the defaults.

        Raises:
            ConfigError: if the processes would not train these parameters together.
        """
        given = param_group["params"]
        if self._admit is not None and not isinstance(given, set):  # which torch refuses
            entries = [given] if isinstance(given, torch.Tensor) else list(given)
            named = bool(entries) and isinstance(entries[0], tuple)
            own: list[Any] = self._admit([entry[1] for entry in entries] if named else entries)
            if named:
                own = [(entry[0], p) for entry, p in zip(entries, own, strict=True)]
            param_group = {**param_group, "params": own}
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; tensors go to the device of their parameters.

        Args:
            state_dict: state of an optimizer with groups of the same sizes.
        """
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch an optimizer that distinguishes the two (schedule-free ones) to training."""
        if callable(method := getattr(self.optimizer, "train", None)):
            method()

    def eval(self) -> None:
        """Switch an optimizer that distinguishes the two (schedule-free ones) to evaluation."""
        if callable(method := getattr(self.optimizer, "eval", None)):
            method()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_admit": None}  # a copy is in no run

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if isinstance(self.scaler, StepScaler):
            self.scaler.register(self.optimizer)

    def _place_state(self) -> None:
        """Let torch cast state to its parameters where any lies on another device."""
        for parameter, state in self.optimizer.state.items():
            tensors = (v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor))
            if any(tensor.device != parameter.device for tensor in tensors):
                self.optimizer.load_state_dict(self.optimizer.state_dict())
                return


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that `prepare` was given."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
