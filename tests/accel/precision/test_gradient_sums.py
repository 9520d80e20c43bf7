"""Gradients of bf16 weights are summed in fp32 over a window of micro-batches (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.handlers import DistributedDataParallelKwargs
from accel.config.training import GradientAccumulationPlugin
from accel.precision.rounding_adamw import RoundingAdamW
from tests.helpers import run_distributed

WINDOW = 1024  # a sum in bf16 of equal parts ends at 256 of them


def layer(size: int = 8) -> torch.nn.Linear:
    made = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(made.weight)
    return made


def prepared(window: int, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window, **options)
    model = layer()
    model, optimizer = accelerator.prepare(model, RoundingAdamW(model.parameters(), lr=1e-3))
    return accelerator, model, optimizer


def backward(accelerator: Accelerator, model: Any, scale: float = 1.0) -> None:
    ones = torch.full((1, 8), scale, dtype=torch.bfloat16)
    accelerator.backward(model(ones).sum())


def test_equal_parts_of_a_large_window_add_up() -> None:
    accelerator, model, optimizer = prepared(WINDOW)
    for _ in range(WINDOW):
        with accelerator.accumulate(model):
            backward(accelerator, model)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
                assert torch.equal(model.weight.grad, torch.ones_like(model.weight))
            optimizer.step()
            optimizer.zero_grad()
    assert norm.item() == 8.0
    assert model.weight.grad is None


def test_a_window_given_as_a_whole_adds_up() -> None:
    accelerator, model, _ = prepared(WINDOW)
    batches = [torch.ones(1, 8, dtype=torch.bfloat16)] * WINDOW
    accelerator.forward_backward(model, batches, lambda module, batch: module(batch).sum())
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight))


def test_the_gradient_is_the_sum_rounded_once() -> None:
    accelerator, model, _ = prepared(16)
    generator = torch.Generator().manual_seed(0)
    exact = torch.zeros(8)
    for _ in range(16):
        with accelerator.accumulate(model):
            batch = torch.randn(1, 8, generator=generator).bfloat16()
            accelerator.backward(model(batch).sum() * 16)
        exact += batch[0].float()
        assert torch.equal(model.weight.grad[0], exact.bfloat16())


def test_the_norm_is_computed_in_fp32() -> None:
    """In bf16 it would be 16.0, as 16.03 lies within half a unit."""
    accelerator, model, _ = prepared(1)
    model.weight.grad = torch.full_like(model.weight, 2.0)
    model.weight.grad[0, 0] = 2.25
    norm = accelerator.clip_grad_norm_(model.parameters(), 8.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx((63 * 4 + 2.25**2) ** 0.5)
    assert model.weight.grad[1, 1].item() == pytest.approx(1.0, rel=2**-8)
    for order in (float("inf"), "inf"):
        norm = accelerator.clip_grad_norm_(model.weight, 1e9, norm_type=order)  # type: ignore[arg-type]
        assert norm.dtype == torch.float32
        assert norm.item() == model.weight.grad.abs().max().item()


def ddp(options: dict[str, bool], each: bool, window: int) -> torch.Tensor:
    plugin = GradientAccumulationPlugin(num_steps=window, sync_each_batch=each)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=plugin,
        kwargs_handlers=[DistributedDataParallelKwargs(**options)],
    )
    model = layer()
    model, optimizer = accelerator.prepare(model, RoundingAdamW(model.parameters(), lr=0.0))
    for _ in range(2):  # DDP builds its buckets again after the first
        optimizer.zero_grad()
        for _ in range(window):
            with accelerator.accumulate(model):
                backward(accelerator, model, 1.0 + 2 * accelerator.process_index)
                optimizer.step()
    found = accelerator.unwrap_model(model).weight.grad.clone()
    accelerator.end_training()
    return found


@pytest.mark.parametrize(
    ("options", "each", "window"),
    [
        ({}, False, 512),
        ({"gradient_as_bucket_view": True}, False, 512),
        ({"gradient_as_bucket_view": True, "static_graph": True}, False, 512),
        ({"gradient_as_bucket_view": True}, True, 16),
        ({"find_unused_parameters": True}, True, 16),
    ],
)
def test_ddp_averages_the_sums(options: dict[str, bool], each: bool, window: int) -> None:
    for found in run_distributed(ddp, 2, options, each, window):
        assert torch.equal(found, torch.full_like(found, 2.0))
