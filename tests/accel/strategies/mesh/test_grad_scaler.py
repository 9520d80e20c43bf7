"""fp16 with sharded gradients: one overflow, and all ranks skip the step; else as under DDP.

Holds E3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from accel.config.handlers import GradScalerKwargs
from accel.machine.enums import DistributedType
from accel.machine.errors import ConfigError
from accel.state import PartialState
from accel.strategies.mesh.gradients import ShardedStepScaler, get_grad_scaler
from tests.accel.strategies.training import Model, adamw, build, data, difference, loss_of
from tests.helpers import run_distributed

SCALE = 1024.0
Engines = dict[str, Any]


def run_of(engines: Engines, accumulation: int = 1, scale: float = SCALE) -> Any:
    handler = GradScalerKwargs(init_scale=scale, growth_interval=2)
    return build(
        **engines,
        mixed_precision="fp16",
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[handler],
    )


# -- an overflow in one shard --------------------------------------------------------------


def spoil(model: torch.nn.Module, kind: type, rank: int) -> None:
    """Let one gradient of a kind overflow on one rank: in its own shard only."""
    name = next(n for n, p in model.named_parameters() if n.endswith("up.weight"))
    chosen = model.get_parameter(name) if kind is DTensor else model.get_parameter("embed.weight")
    assert isinstance(chosen.grad, DTensor) == (kind is DTensor)
    assert chosen.grad is not None
    part = chosen.grad.to_local() if isinstance(chosen.grad, DTensor) else chosen.grad
    if torch.distributed.get_rank() == rank:
        part.detach()[0, 0] = float("inf")


def stepped(engines: Engines, kind: type, spoiled: int | None, fused: bool = False) -> list[Any]:
    """Make one step; return whether it was skipped, whether weights moved, and the next scale."""
    accelerator = run_of(engines)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert type(accelerator.scaler) is ShardedStepScaler
    before = accelerator.get_state_dict(model)
    accelerator.backward(loss_of(model, *data(1).tensors))
    if spoiled is not None:
        spoil(model, kind, spoiled)
    optimizer.step()
    moved = difference(accelerator.get_state_dict(model), before) > 0.0
    found = [optimizer.step_was_skipped, moved, accelerator.scaler.get_scale()]
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, *data(1).tensors))
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert all(bool(p.isfinite().all()) for p in accelerator.get_state_dict(model).values())
    accelerator.end_training()
    return found


def check_parts(world_size: int) -> list[list[Any]]:
    cases: list[tuple[Engines, type]] = [({"fsdp": {}}, DTensor)]
    if world_size == 2:  # the optimizer has the replicated embedding, too
        cases += [({"tp": {"tp_size": 2}}, DTensor), ({"tp": {"tp_size": 2}}, torch.Tensor)]
    else:  # parameters on meshes of one axis and of two
        cases = [({"fsdp": {}, "tp": {"tp_size": 2}}, DTensor)]
    found = []
    for engines, kind in cases:
        assert stepped(engines, kind, None) == [False, True, SCALE]
        found.append(stepped(engines, kind, world_size - 1))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_overflow_in_the_part_of_one_process_skips_the_step_on_all(world_size: int) -> None:
    for found in run_distributed(check_parts, world_size, world_size):
        assert found == [[True, False, SCALE / 2]] * len(found)


def check_fused() -> None:
    assert stepped({"fsdp": {}}, DTensor, None, fused=True) == [False, True, SCALE]
    assert stepped({"fsdp": {}}, DTensor, 0, fused=True) == [True, False, SCALE / 2]


def test_a_fused_optimizer_skips_too() -> None:
    run_distributed(check_fused, 2)


# -- states --------------------------------------------------------------------------------


def saved(folder: str, engines: Engines) -> None:
    accelerator = run_of(engines)
    model, optimizer = (model := Model()), adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(loss_of(model, *data(1).tensors) * float("inf"))
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    accelerator.save_state(folder)
    accelerator.end_training()


def loaded(folder: str, engines: Engines) -> float:
    accelerator = run_of(engines, scale=8.0)
    model, optimizer = (model := Model(seed=4)), adamw(model)
    accelerator.prepare(model, optimizer)
    assert accelerator.scaler.get_scale() == 8.0
    accelerator.load_state(folder)
    scale = accelerator.scaler.get_scale()
    accelerator.end_training()
    return float(scale)


def test_the_scale_is_part_of_the_state_under_any_engine(tmp_path: Path) -> None:
    engines: list[Engines] = [{"fsdp": {}}, {"tp": {"tp_size": 2}}, {}]
    for number, (writer, reader) in enumerate(zip(engines, engines[1:] + engines[:1], strict=True)):
        folder = str(tmp_path / str(number))
        run_distributed(saved, 2, folder, writer)
        assert run_distributed(loaded, 2, folder, reader) == [SCALE / 2] * 2


def test_a_gradient_scaler_on_its_own() -> None:
    PartialState(cpu=True)
    scaler = get_grad_scaler(DistributedType.MULTI_CPU, init_scale=8.0, growth_interval=1)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 8.0
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.5
    assert scaler.get_scale() == 16.0


def test_the_scaler_of_sharded_gradients_is_that_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"accelerator\.scaler"):
        get_grad_scaler(DistributedType.FSDP)
