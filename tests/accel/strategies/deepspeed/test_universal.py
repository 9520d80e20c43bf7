"""DeepSpeed's universal checkpoint: exported, and read only from those who are trusted (R5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.checkpoint.optimizer_state import ParameterNames
from accel.machine.errors import CheckpointError, ConfigError
from accel.utils import DeepSpeedPlugin, DummyScheduler
from tests.accel.strategies.deepspeed.helpers import (
    GLOBAL_BATCH,
    RATE,
    adamw,
    build,
    data,
    error_of,
    largest,
)
from tests.helpers import run_distributed


def started(stage: int) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = build()
    size = GLOBAL_BATCH // accelerator.num_processes
    return (accelerator, *accelerator.prepare(model, adamw(model), data(size)))


def train(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for inputs, targets in batches:
        loss = error_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def held(accelerator: Any, model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and moments by parameter."""
    weights = {n: t.clone() for n, t in accelerator.get_state_dict(model).items()}
    names = ParameterNames([accelerator.unwrap_model(model)])
    return weights, accelerator.strategy.state.optimizer_state(optimizer, names)


def exports(folder: str, stage: int) -> Any:
    accelerator, model, optimizer, loader = started(stage)
    batches = list(loader)
    train(accelerator, model, optimizer, batches[:4])
    for group in optimizer.param_groups:
        group["lr"] = 0.002
    accelerator.save_native(model, folder)
    state = held(accelerator, model, optimizer)
    losses = train(accelerator, model, optimizer, batches[4:7])
    accelerator.end_training()
    return (*state, losses)


def imports(folder: str, stage: int) -> Any:
    accelerator, model, optimizer, loader = started(stage)
    batches = list(loader)
    train(accelerator, model, optimizer, batches[:1])
    with pytest.raises(ConfigError, match="runs any code") as error:
        accelerator.load_native(model, folder)
    assert "trust_pickle=True" in str(error.value)
    accelerator.load_native(model, folder, trust_pickle=True)
    assert {group["lr"] for group in optimizer.param_groups} == {0.002}
    state = held(accelerator, model, optimizer)
    losses = train(accelerator, model, optimizer, batches[4:7])
    accelerator.end_training()
    return (*state, losses)


def agree(found: Any, expected: Any) -> None:
    weights, state, losses = found
    assert largest(weights, expected[0]) == 0.0
    assert state["state"].keys() == expected[1]["state"].keys()
    for name, values in expected[1]["state"].items():
        assert values.keys() == state["state"][name].keys() >= {"exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state["state"][name][key], values[key]) for key in values)
    assert losses == pytest.approx(expected[2], rel=1e-6)


def test_what_two_processes_export_one_and_two_import(tmp_path: Path) -> None:
    expected = run_distributed(exports, 2, str(tmp_path), 2)[0]
    assert {path.name for path in tmp_path.iterdir()} == {"universal", "latest_universal"}
    agree(run_distributed(imports, 2, str(tmp_path), 1)[0], expected)
    agree(run_distributed(imports, 1, str(tmp_path), 2)[0], expected)


def resumes_from_an_export(folder: str) -> None:
    """bf16, a parameter that is frozen, and a schedule that the engine steps."""
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), mixed_precision="bf16"
    )
    model = build()
    model[0].bias.requires_grad_(False)
    optimizer = adamw(model)

    def halving(inner: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)

    scheduler = DummyScheduler(optimizer, lr_scheduler_callable=halving)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batches = list(data(4))
    train(accelerator, model, optimizer, batches[:3])
    accelerator.save_native(model, folder)
    exported, _ = held(accelerator, model, optimizer)
    expected = train(accelerator, model, optimizer, batches[3:5])
    after, _ = held(accelerator, model, optimizer)
    accelerator.load_native(model, folder, trust_pickle=True)
    assert largest(held(accelerator, model, optimizer)[0], exported) == 0.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE * 0.5**3)
    assert train(accelerator, model, optimizer, batches[3:5]) == expected
    assert largest(held(accelerator, model, optimizer)[0], after) == 0.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE * 0.5**5)
    accelerator.end_training()


def test_an_export_holds_what_is_frozen_and_the_schedule(tmp_path: Path) -> None:
    run_distributed(resumes_from_an_export, 2, str(tmp_path))


def refuses(folder: str) -> None:
    accelerator, model, *_ = started(1)
    with pytest.raises(CheckpointError, match="make a step before"):
        accelerator.save_native(model, folder)
    with pytest.raises(CheckpointError, match=r"ds_to_universal\.py first"):
        accelerator.load_native(model, folder, trust_pickle=True)
    with pytest.raises(CheckpointError, match="DeepSpeed does not train"):
        accelerator.save_native(build(), folder)
    accelerator.end_training()
    accelerator, model, *_ = started(3)
    with pytest.raises(CheckpointError, match="stage 3 of ZeRO"):
        accelerator.save_native(model, folder)
    accelerator.end_training()


def test_what_the_format_has_no_place_for_is_refused(tmp_path: Path) -> None:
    run_distributed(refuses, 1, str(tmp_path))


def test_other_engines_have_no_format_of_their_own(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match="save_native under single: it has no format"):
        accelerator.save_native(model, tmp_path)
    with pytest.raises(CheckpointError, match="Call load_state"):
        accelerator.load_native(model, tmp_path, trust_pickle=True)
    accelerator.end_training()
