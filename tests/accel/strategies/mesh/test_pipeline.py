"""Pipeline parallelism on gloo trains as one process does. Holds E3, E5, R5."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.checkpoint.optimizer_state import ParameterNames
from accel.config.parallelism import ParallelismConfig
from accel.machine.errors import StateError
from accel.state import AcceleratorState
from accel.strategies.mesh.state import full_tensor
from tests.accel.strategies.training import Block, Model, loss_of
from tests.helpers import run_distributed

MICRO_BATCHES = 4
# Of losses, relative; of gradients, relative to the largest of a parameter.
CLOSE = 1e-6


def deep(frozen: bool = True) -> Model:
    """Return a model of four blocks: one for each stage of two ranks, or two."""
    model = Model(frozen=frozen)
    model.blocks.extend([Block(20), Block(20)])
    return model


def windows(count: int, size: int = 2) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(12, (count, MICRO_BATCHES, size, 4), generator=generator)
    return [[(one, one.roll(-1, dims=1)) for one in window] for window in tokens]


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_of(model, *batch)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def share(window: list[Any], accelerator: Accelerator) -> list[Any]:
    """Return this rank's part of each micro-batch."""
    dims = accelerator.parallel_dims
    return [tuple(x.chunk(dims.dp_size)[dims.dp_rank] for x in batch) for batch in window]


def accelerator_of(**sizes: Any) -> Accelerator:
    AcceleratorState._reset_state(True)
    config = ParallelismConfig(**sizes) if sizes else None
    return Accelerator(
        cpu=True, parallelism_config=config, gradient_accumulation_steps=MICRO_BATCHES
    )


def plain(model: torch.nn.Module, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the losses and the gradients of each step of a plain loop."""
    optimizer = optimizer_of(model)
    losses, gradients = [], []
    for window in windows(steps):
        for batch in window:
            loss = loss_fn(model, batch)
            losses.append(loss.item())
            (loss / MICRO_BATCHES).backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def check_as_plain(sizes: dict[str, Any], frozen: bool) -> None:
    torch.set_default_dtype(torch.float64)
    expected_losses, expected = plain(deep(frozen), 3)
    accelerator = accelerator_of(**sizes)
    model = deep(frozen)
    optimizer = optimizer_of(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step, window in enumerate(windows(3)):
        mine = share(window, accelerator)
        found = accelerator.forward_backward(model, mine, loss_fn)
        losses += [accelerator.reduce(one, "mean").item() for one in found]
        for name, parameter in model.module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                wanted = expected[step][name.replace("head", "embed")]
                gradient = full_tensor(parameter.grad)
                torch.testing.assert_close(gradient, wanted, rtol=CLOSE, atol=1e-12)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(losses, expected_losses, rtol=CLOSE, atol=0)
    accelerator.end_training()
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "schedule"),
    [
        ("dp_shard", "1F1B"),
        ("dp_shard", "ZBVZeroBubble"),
        ("dp_replicate", "InterleavedZeroBubble"),
        ("tp", "1F1B"),
        ("tp", "Interleaved1F1B"),
    ],
)
def test_other_axes_train_as_one_process(axis: str, schedule: str) -> None:
    sizes = {"pp_size": 2, f"{axis}_size": 2, "pp_schedule": schedule}
    run_distributed(check_as_plain, 4, sizes, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", None]
)
@pytest.mark.parametrize("frozen", [True, False])
def test_training_is_that_of_one_process(schedule: str | None, frozen: bool) -> None:
    run_distributed(check_as_plain, 2, {"pp_size": 2, "pp_schedule": schedule}, frozen)


# -- evaluation, checkpoints -------------------------------------------------------------------


def check_evaluation() -> None:
    accelerator = accelerator_of(pp_size=2)
    model = accelerator.prepare(deep())
    for rows in (1, 3):
        tokens = torch.randint(12, (rows, 4), generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            assert torch.equal(model(tokens), deep()(tokens))
    with pytest.raises(StateError, match="is called with gradients"):
        model(tokens)
    with pytest.raises(StateError, match="order of a schedule"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    own = accelerator.unwrap_model(model)
    with torch.no_grad():
        assert torch.equal(own(tokens), deep()(tokens))
    with pytest.raises(StateError, match="is called by itself"):
        own.embed(tokens)
    accelerator.end_training()


@pytest.mark.slow
def test_every_rank_gets_the_output_of_an_evaluation() -> None:
    run_distributed(check_evaluation, 2)


def trained(folder: Path, sizes: dict[str, Any], steps: range, resume: bool) -> dict[str, Any]:
    """Train some steps, from a checkpoint or the start; save, and return the full state."""
    accelerator = accelerator_of(**sizes)
    model = deep(frozen=False)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    if resume:
        accelerator.load_state(str(folder))
    for window in windows(steps.stop)[steps.start :]:
        accelerator.forward_backward(model, window, loss_fn)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))
    names = ParameterNames([accelerator.unwrap_model(model)])
    state = {
        "model": accelerator.get_state_dict(model),
        "optimizer": accelerator.strategy.state.optimizer_state(optimizer, names)["state"],
    }
    accelerator.end_training()
    return copy.deepcopy(state)


ONE: dict[str, Any] = {}
TWO = {"pp_size": 2}


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_resume(folder: Path, sizes: dict[str, Any]) -> None:
    """A run that was interrupted ends as one that was not."""
    whole = trained(folder / "whole", sizes, range(4), resume=False)
    trained(folder / "half", sizes, range(2), resume=False)
    assert_equal(trained(folder / "half", sizes, range(2, 4), resume=True), whole)


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    run_distributed(check_resume, 2, tmp_path, TWO)


@pytest.mark.slow
def test_state_moves_between_stages_and_one_process(tmp_path: Path) -> None:
    (saved, _) = run_distributed(trained, 2, tmp_path, TWO, range(2), False)
    alone = run_distributed(trained, 1, tmp_path, ONE, range(2, 2), True)[0]
    assert_equal(alone, saved)
    assert alone["model"]["head.weight"].shape == (12, 8)
    for again in run_distributed(trained, 2, tmp_path, TWO, range(2, 2), True):
        assert_equal(again, saved)
