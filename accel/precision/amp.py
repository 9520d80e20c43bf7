"""Mixed precision of torch itself: autocast for bf16 and fp16, a gradient scaler for fp16."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.backends import mha
from torch.utils.weak import WeakIdKeyDictionary

from accel.config.handlers import AutocastKwargs, check_handler
from accel.machine.errors import StateError
from accel.precision.base import COMPUTE_DTYPES, Precision
from accel.precision.wrapping import wrap_forward
from accel.state import AcceleratorState


class StepScaler(torch.amp.GradScaler):
    """A gradient scaler for any number of optimizers, each stepped when its owner likes.

    torch's own wants one `update` after all steps of an iteration: an update between the steps of
    two optimizers would change the scale under gradients that are already scaled, and forget which
    of them are unscaled. Here `update` only notes that one is due, and the next loss to be scaled
    carries it out; so does reading the scale or the state.

    Gradients that are held meanwhile (of a window of accumulation, of another optimizer, of a step
    without `zero_grad`) follow the scale: they are multiplied by its change. Scales are
    powers of two unless the factors say otherwise, so that nothing is rounded.

    Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """

    _update_is_due = False

    def __init__(self, device: str, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._forget_optimizers()

    def _forget_optimizers(self) -> None:
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._unscaled: set[int] = set()  # ids of optimizers, until the next loss is scaled
        self._stepped: set[int] = set()
        # Parameters of no optimizer that were clipped: whether they are unscaled.
        self._loose: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the gradients of `optimizer` follow the scale, from its first step on at latest."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._unscaled.discard(id(optimizer))  # of one that is gone
            self._stepped.discard(id(optimizer))

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, unless that was done for this step."""
        if self._enabled and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale; once a step."""
        if not self._enabled:
            return
        self.register(optimizer)
        if id(optimizer) not in self._unscaled and self._scale is not None:
            own = {id(p) for p in parameters_of(optimizer)} if self._any_unscaled() else set()
            common = [p for p in self._parameters(unscaled=True) if id(p) in own] if own else []
            self._multiply(self._gradients(common), self._scale)
        super().unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def unscale_loose(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide gradients of parameters that no optimizer holds by the scale, once a step."""
        chosen = [p for p in parameters if p.grad is not None and not self._loose.get(p)]
        if self._scale is not None and chosen:
            self._multiply(self._gradients(chosen), self._scale.double().reciprocal().float())
            self._loose.update((p, True) for p in chosen)

    def skip_unless_finite(
        self, norm: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Let none of `optimizers` step where the norm [] by which all are clipped is not finite.

        Their gradients were multiplied by it, also those of optimizers without an overflow.
        """
        overflow = (~torch.isfinite(norm.detach())).float()
        for optimizer in optimizers:
            for flag in self._found_inf_per_device(optimizer).values():
                torch.maximum(flag, overflow.to(flag.device), out=flag)

    def _any_unscaled(self) -> bool:
        return bool(self._unscaled) or any(self._loose.values())

    def step(
        self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> float | None:
        """Step `optimizer` by unscaled gradients, unless they overflowed."""
        result = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            self._stepped.add(id(optimizer))
            self._update_is_due = True
        return result

    def step_unless_overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step `optimizer` unless its gradients overflowed; return whether they did.

        Reads one flag from the device. An optimizer without gradients is stepped as it is. Raise
        `StateError` if there are gradients, and no loss was scaled since its last step, or ever.
        """
        if self._scale is None or id(optimizer) in self._stepped:
            if has_gradients(optimizer):
                raise StateError(_unscaled_message(self._scale is None))
        else:
            self.unscale_once(optimizer)
        flags = self._found_inf_per_device(optimizer)
        if not flags or id(optimizer) in self._stepped:
            self._forget(optimizer)
            optimizer.step()
            return False
        skipped = any(bool(flag.item()) for flag in flags.values())
        self.step(optimizer)
        return skipped

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._stepped:  # else its flags count in the update that is due
            self._unscaled.discard(id(optimizer))
            self._per_optimizer_states.pop(id(optimizer), None)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale before the next loss is scaled; a `new_scale` is set at once."""
        if new_scale is None:
            self._update_is_due = self._enabled
        elif self._enabled:
            self._change_scale(new_scale)

    def flush(self) -> None:
        """Carry out an update that is due."""
        if self._update_is_due:
            self._change_scale()

    def _change_scale(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what the last steps found, or set it in place of that."""
        self._update_is_due = False
        states = self._per_optimizer_states
        stepped = {k: v for k, v in states.items() if v["stage"] is OptState.STEPPED}
        waiting = {k: v for k, v in states.items() if stepped and k not in stepped}
        for key in waiting:  # what they found counts when they step
            del states[key]
        with self._held_gradients_follow():
            super().update(new_scale)
        self._per_optimizer_states.update(waiting)

    @contextlib.contextmanager
    def _held_gradients_follow(self) -> Iterator[None]:
        """Multiply scaled gradients by the change of the scale in the context."""
        held = [] if self._scale is None else self._scaled_gradients()
        if not held:
            yield
            return
        before = self._scale_now().clone()
        yield
        self._multiply(held, self._scale_now() / before)

    def _scale_now(self) -> torch.Tensor:
        assert self._scale is not None
        return self._scale

    def _scaled_gradients(self) -> list[torch.Tensor]:
        others = {id(p) for p in self._parameters(unscaled=True)} if self._any_unscaled() else ()
        chosen = [p for p in self._parameters(unscaled=False) if id(p) not in others]
        return self._gradients(chosen)

    def _parameters(self, unscaled: bool) -> list[torch.Tensor]:
        """Return the parameters of optimizers in this state, each once."""
        own = [o for o in self._known if (id(o) in self._unscaled) == unscaled]
        loose = [p for p, is_unscaled in self._loose.items() if is_unscaled == unscaled]
        if len(own) == 1 and not loose:
            return parameters_of(own[0])
        held = [p for optimizer in own for p in parameters_of(optimizer)]
        return list({id(p): p for p in (*held, *loose)}.values())

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients that are there, as tensors that can be multiplied in place."""
        found = [p.grad for p in parameters if p.grad is not None]
        return [g._values() if g.is_sparse else g.detach() for g in found]

    @staticmethod
    def _multiply(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in gradients:
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        with torch.no_grad():
            for (device, _), same in kinds.items():
                torch._foreach_mul_(same, factor.to(device))

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or an iterable of losses, by the scale."""
        self.flush()
        if self._any_unscaled():
            self._scale_again()
        return super().scale(outputs)

    def _scale_again(self) -> None:
        """Scale unscaled gradients: a backward pass adds scaled ones to them."""
        if self._scale is not None:
            self._multiply(self._gradients(self._parameters(unscaled=True)), self._scale)
        for key in self._unscaled:
            self._per_optimizer_states.pop(key, None)
        self._unscaled.clear()
        self._stepped.clear()
        self._loose.update((parameter, False) for parameter in list(self._loose))

    def get_scale(self) -> float:
        """Return the scale (waits for the device)."""
        self.flush()
        return super().get_scale()

    def state_dict(self) -> dict[str, object]:
        """Return scale, factors and the count of steps without overflow."""
        self.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take over what `state_dict` returned."""
        self.flush()
        with self._held_gradients_follow():
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, object]:
        self.flush()
        left = ("_known", "_unscaled", "_stepped", "_loose")  # a copy has optimizers of its own
        return {k: v for k, v in super().__getstate__().items() if k not in left}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._forget_optimizers()


def _unscaled_message(never: bool) -> str:
    if never:
        return (
            "Gradients were computed with loss.backward(), so they are not scaled for fp16. "
            "Call accelerator.backward(loss)."
        )
    return (
        "optimizer.step() under fp16 with gradients, but without accelerator.backward(loss) since "
        "its last step: they were unscaled and stepped already, or come from loss.backward(). "
        "Call accelerator.backward(loss) before each step, or optimizer.zero_grad() after it."
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of `optimizer`."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of `optimizer` has a gradient."""
    return any(p.grad is not None for p in parameters_of(optimizer))


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
    """Autocast around the forward pass."""

    def __init__(self, name: str, device_type: str, autocast: AutocastKwargs) -> None:
        self.name = name
        self.dtype = COMPUTE_DTYPES[name]
        self.device_type = device_type
        self.handler = autocast
        if device_type != CHECKED:
            mha.set_fastpath_enabled(False)

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        return autocast(self.device_type, self.dtype, handler or self.handler)

    def wrap_forward(self, model: torch.nn.Module, outputs_in_fp32: bool = True) -> None:
        wrap_forward(model, self.autocast, outputs_in_fp32)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[object]:
    """Return a context that computes in the mixed precision of the run.

    Args:
        native_amp: whether it does; else the context changes nothing.
        autocast_kwargs: takes the place of `AutocastKwargs()`.

    Raises:
        ConfigError: for a handler of another kind.
    """
    check_handler(autocast_kwargs, AutocastKwargs, "get_mixed_precision_context_manager")
    if not native_amp:
        return contextlib.nullcontext()
    state = AcceleratorState()
    dtype = COMPUTE_DTYPES.get(state.mixed_precision)
    return autocast(state.device.type, dtype, autocast_kwargs or AutocastKwargs())


# The kind of device whose autocast torch's modules look at. Under that of another one, attention
# layers would take their fast path when they evaluate, which computes in the format of the weights.
CHECKED = "cuda"


def autocast(
    device_type: str, dtype: torch.dtype | None, handler: AutocastKwargs
) -> AbstractContextManager[object]:
    """Return `torch.autocast` for a device, as a handler wants it."""
    return torch.autocast(
        device_type, dtype=dtype, enabled=handler.enabled, cache_enabled=handler.cache_enabled
    )


# -- tf32: fp32 matrix products and convolutions with 10 bits of mantissa,  -------------------


@contextlib.contextmanager
def tf32(enabled: bool | None) -> Iterator[None]:
    """Let fp32 matrix products and convolutions on GPUs use TF32 within the context, or not.

    Inputs are rounded to 10 bits of mantissa, sums are in fp32. Elsewhere it changes nothing.

    Args:
        enabled: whether they do; None: as torch has it (products in fp32, convolutions in TF32).

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html
        (TensorFloat-32 on Ampere and later devices)
    """
    if enabled is None:
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
