"""Communication hooks of DDP: what each hook and wrapper does to the numbers (E1)."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from accel import Accelerator, DistributedDataParallelKwargs
from accel.machine.errors import ConfigError
from accel.state import AcceleratorState
from tests.helpers import run_distributed

HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
WRAPPERS = ("no", "fp16", "bf16")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
COMPRESSED_FROM = 2  # what torch demands at least
TOLERANCE = {"no": 1e-5, "fp16": 5e-3, "bf16": 5e-2}


def orthogonalize_any(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """Do what torch's function does, also for one matrix [n, r], which the batched hook gives."""
    several = matrices if matrices.dim() == 3 else matrices.unsqueeze(0)
    OF_TORCH(several, epsilon)


def orthogonalize_several(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """Fail for one matrix, as torch 2.13 does."""
    if matrices.dim() != 3:
        raise AssertionError
    OF_TORCH(matrices, epsilon)


OF_TORCH = powerSGD_hook._orthogonalize


@mock.patch.object(powerSGD_hook, "_orthogonalize", orthogonalize_any)
def gradients(
    hook: str, wrapper: str, options: dict[str, Any], size: int = 8, steps: int = 3
) -> list[torch.Tensor]:
    """Return a weight's gradient [size, size] of some steps; each process has its own inputs."""
    handler = DistributedDataParallelKwargs(
        comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options
    )
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(size, size, bias=False))
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        inputs = torch.randn(20, size, generator=generator)
        model.zero_grad()
        accelerator.backward((model(inputs) ** 3).mean())
        found.append(model.module.weight.grad.clone())
    return found


def options_of(hook: str, **more: Any) -> dict[str, Any]:
    return {"start_powerSGD_iter": COMPRESSED_FROM, **more} if "power_sgd" in hook else {}


def all_gradients() -> dict[tuple[str, str], list[torch.Tensor]]:
    return {(h, w): gradients(h, w, options_of(h)) for h, w in product(HOOKS, WRAPPERS)}


@functools.cache
def gathered(world_size: int) -> list[dict[tuple[str, str], list[torch.Tensor]]]:
    """Return `all_gradients` of each rank: one distributed call for all tests of this file."""
    return run_distributed(all_gradients, world_size)


def fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor, tensor.to(dtype).to(tensor.dtype))


def is_projection(compressed: torch.Tensor, whole: torch.Tensor, tolerance: float) -> bool:
    """Return whether `compressed` is `whole` projected onto one direction of its columns."""
    singular = torch.linalg.svdvals(compressed)
    off = compressed.T @ (whole - compressed)
    return bool(singular[1] < tolerance * singular[0] and off.norm() < tolerance)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_and_its_wrapper_show_in_the_numbers(
    hook: str, wrapper: str, world_size: int
) -> None:
    ranks = gathered(world_size)
    exact, found = ranks[0]["no", "no"], ranks[0][hook, wrapper]
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other[hook, wrapper], found, strict=True))
    lowest = "bf16" if "bf16" in (hook, wrapper) else "fp16" if "fp16" in (hook, wrapper) else "no"
    tolerance = TOLERANCE[lowest]
    torch.testing.assert_close(found[0], exact[0], rtol=tolerance, atol=tolerance / 10)
    if lowest != "no":
        assert fits(found[0], DTYPES[lowest])
        assert not fits(exact[0], DTYPES[lowest])
    if "power_sgd" in hook:
        compressed, whole = found[COMPRESSED_FROM], exact[COMPRESSED_FROM]
        assert is_projection(compressed, whole, tolerance)
        assert not is_projection(whole, whole, tolerance)
    if wrapper != "no":
        assert all(fits(gradient, DTYPES[wrapper]) for gradient in found)


def refused(options: dict[str, Any], hook: str) -> str:
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(torch.nn.Linear(1, 1))
    return str(caught.value)


def refused_batched() -> str:
    with mock.patch.object(powerSGD_hook, "_orthogonalize", orthogonalize_several):
        return refused({}, "batched_power_sgd")


def test_a_batched_hook_that_fails_is_refused() -> None:
    for answer in run_distributed(refused_batched, 2):
        assert "comm_hook='batched_power_sgd': the batched PowerSGD hook of torch" in answer
        assert answer.endswith("Use comm_hook='power_sgd'.")


def test_options_that_a_hook_does_not_have_are_refused() -> None:
    answers = run_distributed(refused, 2, {"matrix_approximation_rank": 2}, "fp16")
    assert "only power_sgd and batched_power_sgd have a state" in answers[0]


def compressed() -> int:
    options = options_of("power_sgd", matrix_approximation_rank=2)
    gradient = gradients("power_sgd", "no", options, size=14)[COMPRESSED_FROM]
    return int(torch.linalg.matrix_rank(gradient, rtol=1e-4))


def test_the_state_of_a_hook_takes_its_options() -> None:
    assert run_distributed(compressed, 2) == [2, 2]
