"""Mixed precision of torch itself: autocast for bf16 and fp16, a gradient scaler for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accel.config.handlers import AutocastKwargs
from accel.errors import StateError
from accel.precision.base import Precision
from accel.wrapping import unwrap_forward, wrap_forward

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepScaler(torch.amp.GradScaler):
    """A gradient scaler for any number of optimizers, each stepped when its owner likes.

    torch's own wants one `update` after all steps of an iteration: an update between the steps of
    two optimizers would change the scale under gradients that are already scaled, and forget which
    of them are unscaled. Here `update` only notes that one is due, and the next loss to be scaled
    carries it out; so does reading the scale or the state.

    Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """

    _update_is_due = False

    def __init__(self, device: str, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._unscaled: set[int] = set()

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, unless that was done for this step."""
        if self._enabled and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale; once a step."""
        super().unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def step_unless_overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step `optimizer` unless its gradients overflowed; return whether they did.

        Reads one flag from the device. An optimizer without gradients is stepped as it is.

        Raises:
            StateError: if no loss was ever scaled, and yet there are gradients.
        """
        if self._scale is not None:
            self.unscale_once(optimizer)
        elif has_gradients(optimizer):
            raise StateError(
                "Gradients were computed with loss.backward(), so they are not scaled for fp16. "
                "Call accelerator.backward(loss)."
            )
        flags = self._found_inf_per_device(optimizer)
        if not flags:
            self._forget(optimizer)
            optimizer.step()
            return False
        skipped = any(bool(flag.item()) for flag in flags.values())
        self.step(optimizer)
        self.update()
        return skipped

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        self._unscaled.discard(id(optimizer))
        self._per_optimizer_states.pop(id(optimizer), None)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale before the next loss is scaled; a `new_scale` is set at once."""
        if new_scale is None:
            self._update_is_due = self._enabled
        else:
            super().update(new_scale)

    def flush(self) -> None:
        """Carry out an update that is due."""
        if self._update_is_due:
            self._update_is_due = False
            super().update()
            self._unscaled.clear()

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or an iterable of losses, by the scale."""
        self.flush()
        return super().scale(outputs)

    def get_scale(self) -> float:
        """Return the scale (waits for the device)."""
        self.flush()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return scale, factors and the count of steps without overflow."""
        self.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._update_is_due = False
        self._unscaled.clear()
        super().load_state_dict(state_dict)


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of `optimizer` has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def step_unless_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Step `optimizer` through any `scaler` and update that; return whether the step was skipped.

    Source: https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.get_scale
    """
    if not scaler.is_enabled():
        optimizer.step()
        return False
    if isinstance(scaler, StepScaler):
        return scaler.step_unless_overflow(optimizer)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < before


class AmpPrecision(Precision):
    """Autocast around the forward pass.

    Args:
        name: "bf16" or "fp16".
        device_type: "cpu", "cuda", ….
        autocast: behaviour of autocast.
    """

    def __init__(self, name: str, device_type: str, autocast: AutocastKwargs) -> None:
        self.name = name
        self.dtype = DTYPES[name]
        self.device_type = device_type
        self.handler = autocast

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context of a forward pass; `handler` takes the place of the run's own."""
        chosen = handler or self.handler
        return torch.autocast(
            self.device_type,
            dtype=self.dtype,
            enabled=chosen.enabled,
            cache_enabled=chosen.cache_enabled,
        )

    def wrap_forward(self, model: torch.nn.Module, outputs_in_fp32: bool = True) -> None:
        """Make `model.forward` compute under autocast and return fp32, or what it computed."""
        wrap_forward(model, self.autocast, outputs_in_fp32)

    def unwrap_forward(self, model: torch.nn.Module) -> None:
        """Give `model` its own `forward` back."""
        unwrap_forward(model)
