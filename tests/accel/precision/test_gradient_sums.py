"""Gradients of bf16 weights are summed in fp32 over a window of micro-batches."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.handlers import DistributedDataParallelKwargs
from accel.config.training import GradientAccumulationPlugin
from accel.precision import gradient_sums
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


def held(model: torch.nn.Module) -> Any:
    (parameter,) = model.parameters()
    return gradient_sums._SUMS[parameter]


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


def test_parts_under_no_sync_add_up() -> None:
    accelerator, model, _ = prepared(1)
    with accelerator.no_sync(model):
        for _ in range(WINDOW - 1):
            backward(accelerator, model, 1 / WINDOW)
    backward(accelerator, model, 1 / WINDOW)
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


@pytest.mark.parametrize("way", ["none", "zero", "data", "scaled", "replaced"])
def test_what_is_written_to_a_gradient_counts(way: str) -> None:
    accelerator, model, optimizer = prepared(4)
    for _ in range(2):
        with accelerator.accumulate(model):
            backward(accelerator, model, 4.0)
    before = 0.0
    if way in ("none", "zero"):
        optimizer.optimizer.zero_grad(set_to_none=way == "none")
    elif way == "data":  # torch counts no write to it
        model.weight.grad.data.zero_()
    elif way == "scaled":
        model.weight.grad.mul_(0.25)
        before = 0.5
    else:
        model.weight.grad = torch.full_like(model.weight, 3.0)
        before = 3.0
    for number in (1, 2):
        with accelerator.accumulate(model):
            backward(accelerator, model, 4.0)
        assert torch.equal(model.weight.grad, torch.full_like(model.weight, before + number))


def test_a_hook_on_the_gradient_is_kept() -> None:
    """One that is registered later, too: it is the changed gradient that is added."""
    accelerator, model, _ = prepared(4)
    for number in range(4):
        with accelerator.accumulate(model):
            backward(accelerator, model, 4.0)
        if number == 0:
            model.weight.register_hook(lambda gradient: gradient * 2)
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 7.0))


def test_a_window_of_one_keeps_no_sum() -> None:
    accelerator, model, optimizer = prepared(1)
    with accelerator.accumulate(model):
        backward(accelerator, model)
        optimizer.step()
        optimizer.zero_grad()
    (parameter,) = model.parameters()
    assert parameter not in gradient_sums._SUMS
    assert not parameter._backward_hooks


def test_a_step_frees_the_sum_and_a_model_is_freed_with_its_own() -> None:
    accelerator, model, optimizer = prepared(2)
    for _ in range(2):
        with accelerator.accumulate(model):
            backward(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
    assert held(model)._rest is None
    copied = copy.deepcopy(model)
    assert not copied.weight._backward_hooks
    seen = weakref.ref(model.weight)
    accelerator.free_memory()
    del model, optimizer
    gc.collect()
    assert seen() is None


def test_layers_that_are_added_or_unfrozen_take_part() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model = torch.nn.Sequential(layer(), layer(), layer())
    model[1].requires_grad_(False)
    made = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.0)
    model, optimizer = accelerator.prepare(model, made)

    def window() -> None:
        for _ in range(WINDOW):
            with accelerator.accumulate(model):
                output = sum(part(torch.ones(1, 8, dtype=torch.bfloat16)).sum() for part in model)
                accelerator.backward(output)

    window()
    optimizer.optimizer.zero_grad()
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    model[2].zero_grad()
    window()
    for part in model:
        assert torch.equal(part.weight.grad, torch.ones_like(part.weight))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_of_gradients_are_left_to_torch() -> None:
    accelerator, model, _ = prepared(2)
    for _ in range(2):
        with accelerator.accumulate(model):
            output = model(torch.ones(1, 8, dtype=torch.bfloat16)).square().sum()
            accelerator.backward(output, create_graph=True)
    assert model.weight.grad.requires_grad
    model.weight.grad = None


def test_the_norm_is_computed_in_fp32() -> None:
    """In bf16 it would be 16.0, as 16.03 lies within half a unit."""
    accelerator, model, _ = prepared(1)
    model.weight.grad = torch.full_like(model.weight, 2.0)
    model.weight.grad[0, 0] = 2.25
    norm = accelerator.clip_grad_norm_(model.parameters(), 8.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx((63 * 4 + 2.25**2) ** 0.5)
    assert model.weight.grad[1, 1].item() == pytest.approx(1.0, rel=2**-8)
    assert accelerator.clip_grad_norm_(model.weight, 1e9, norm_type=float("inf")).dtype == (
        torch.float32
    )


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
