"""Number formats: what a prepared model computes in, and what an overflow does (E3)."""

from __future__ import annotations

import pytest
import torch

from accel import Accelerator
from accel.config.handlers import AutocastKwargs, GradScalerKwargs
from accel.machine.errors import StateError
from accel.precision.amp import get_mixed_precision_context_manager
from accel.precision.base import Precision
from accel.state import AcceleratorState


class Probe(torch.nn.Module):
    """Remembers the type that its layer computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.seen: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        self.seen = outputs.dtype
        return {"logits": outputs}


def test_full_precision_leaves_the_model_alone() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Probe())
    assert type(accelerator.precision) is Precision
    assert "forward" not in model.__dict__
    assert accelerator.scaler is None
    with accelerator.autocast():
        assert model(torch.ones(1, 4))["logits"].dtype == torch.float32
    assert model.seen == torch.float32


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_computes_low_and_returns_fp32(name: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=name)
    model = accelerator.prepare(Probe())
    assert model(torch.ones(1, 4))["logits"].dtype == torch.float32
    assert model.seen == dtype
    assert model.layer.weight.dtype == torch.float32
    assert (accelerator.scaler is not None) == (name == "fp16")
    assert accelerator.mixed_precision == name
    with accelerator.autocast():
        assert model.layer(torch.ones(1, 4)).dtype == dtype


def test_autocast_takes_a_handler_in_place_of_the_runs_own() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    layer = torch.nn.Linear(4, 2)
    with accelerator.autocast():
        assert layer(torch.ones(1, 4)).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert layer(torch.ones(1, 4)).dtype == torch.float32
    off = AutocastKwargs(enabled=False, cache_enabled=False)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[off])
    model = accelerator.prepare(Probe())
    model(torch.ones(1, 4))
    assert model.seen == torch.float32


def test_unwrapping_gives_the_models_own_forward_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Probe())
    assert accelerator.unwrap_model(model) is model
    assert "forward" in model.__dict__
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in plain.__dict__
    plain(torch.ones(1, 4))
    assert plain.seen == torch.float32


def train_fp16(
    overflow_at: int, fused: bool, steps: int = 3
) -> tuple[list[bool], list[float], list[float]]:
    """Return, by step: whether it was skipped, the scale, the learning rate."""
    handler = GradScalerKwargs(init_scale=1024.0, growth_interval=1000)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, inner, scheduler)
    skipped, scales, rates = [], [], []
    for step in range(steps):
        inputs = torch.full((2, 4), 1e30 if step == overflow_at else 0.1)
        before = model.weight.detach().clone()
        accelerator.backward(model(inputs).mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert torch.equal(before, model.weight) == optimizer.step_was_skipped
        skipped.append(accelerator.optimizer_step_was_skipped)
        scales.append(accelerator.scaler.get_scale())
        rates.append(scheduler.get_last_lr()[0])
    return skipped, scales, rates


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_the_scheduler_and_lowers_the_scale(fused: bool) -> None:
    skipped, scales, rates = train_fp16(1, fused)
    assert skipped == [False, True, False]
    assert scales == [1024.0, 512.0, 512.0]
    assert rates == [0.5, 0.5, 0.25]


def unscaled(*chosen: str) -> list[float]:
    """Return the gradients, 1 but for a scale of 64, of two models after unscaling `chosen`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    handler = GradScalerKwargs(init_scale=64.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for model in models)
    *models, prepared, _ = accelerator.prepare(*models, first, second)
    accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model in models))
    which = {"first": first, "prepared": prepared, "list": [first, second], "all": None}
    for name in chosen:
        accelerator.unscale_gradients(which[name])
    return [model.weight.grad.item() for model in models]


def test_gradients_are_unscaled_once_and_only_where_asked() -> None:
    assert unscaled() == [64.0, 64.0]
    assert unscaled("all") == [1.0, 1.0]
    assert unscaled("list") == [1.0, 1.0]
    assert unscaled("first") == [1.0, 64.0]
    assert unscaled("prepared", "first") == [1.0, 64.0]
    assert unscaled("prepared", "all", "list") == [1.0, 1.0]


def test_clipping_scaled_gradients_within_a_window_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        with pytest.raises(StateError, match="sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_context_computes_in_the_precision_of_the_run(precision: str, dtype: torch.dtype) -> None:
    AcceleratorState(precision, cpu=True)
    product = torch.ones(1, 1) @ torch.ones(1, 1)
    with get_mixed_precision_context_manager(native_amp=True):
        assert (product @ product).dtype == dtype
    with get_mixed_precision_context_manager():
        assert (product @ product).dtype == torch.float32
    off = AutocastKwargs(enabled=False)
    with get_mixed_precision_context_manager(True, autocast_kwargs=off):
        assert (product @ product).dtype == torch.float32
