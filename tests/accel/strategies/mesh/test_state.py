"""A state written under one engine and number of processes is read under another, bit for bit.

Holds R5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.checkpoint.optimizer_state import ParameterNames
from accel.comm.rng import set_seed
from accel.data.loaders import DataLoaderShard
from accel.machine.errors import CheckpointError
from tests.accel.strategies.training import (
    BATCH,
    Model,
    adamw,
    build,
    data,
    difference,
    loss_of,
    steps_of,
)
from tests.helpers import run_distributed

Full = dict[str, torch.Tensor]


def full_state(accelerator: Any, model: torch.nn.Module, optimizer: Any) -> Full:
    """Return weights, moments and options, in full tensors by name."""
    strategy = accelerator.strategy
    names = ParameterNames([strategy.state.unwrap(model)])
    saved = strategy.state.optimizer_state(optimizer, names)
    state = {f"model/{k}": v.clone() for k, v in accelerator.get_state_dict(model).items()}
    for name, entry in saved["state"].items():
        state |= {f"{name}/{k}": torch.as_tensor(v).clone() for k, v in entry.items()}
    return state | {"lr": torch.tensor(saved["param_groups"][0]["lr"])}


def started(engines: dict[str, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    accelerator = build(**engines)
    model = Model(seed=seed)
    return accelerator, *accelerator.prepare(model, adamw(model), DataLoader(data(), BATCH))


def write(path: str, engines: dict[str, Any]) -> tuple[Full, Full]:
    """Train, save, and train on; return the states at both moments."""
    accelerator, model, optimizer, loader = started(engines, seed=0)
    steps_of(accelerator, model, optimizer, loader)
    accelerator.save_state(path)
    saved = full_state(accelerator, model, optimizer)
    steps_of(accelerator, model, optimizer, loader)
    later = full_state(accelerator, model, optimizer)
    accelerator.end_training()
    return saved, later


def read(
    path: str, engines: dict[str, Any], again: str | None = None, evaluate: bool = False
) -> tuple[Full, Full]:
    """Load into a fresh run, save it again, and train on; return the states at both moments."""
    accelerator, model, optimizer, loader = started(engines, seed=5)
    if evaluate:  # leaves parameters gathered
        with torch.no_grad():
            loss_of(model, *data().tensors)
    accelerator.load_state(path)
    if again is not None:
        accelerator.save_state(again)
    loaded = full_state(accelerator, model, optimizer)
    steps_of(accelerator, model, optimizer, loader)
    later = full_state(accelerator, model, optimizer)
    accelerator.end_training()
    return loaded, later


@pytest.mark.slow  # seven worlds, one after the other
def test_a_state_of_any_engine_is_read_under_any_other(tmp_path: Path) -> None:
    first = str(tmp_path / "two")
    saved, later = run_distributed(write, 2, first, {"fsdp": {}})[0]
    readers: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (4, {"fsdp": {"dp_replicate_size": 2, "cpu_offload": True}}),
        (2, {"tp": {"tp_size": 2}}),
        (4, {"fsdp": {}, "tp": {"tp_size": 2}}),
        (2, {}),
        (2, {"fsdp": {}}),
    ]
    path = first
    for number, (world_size, engines) in enumerate(readers):
        again = str(tmp_path / str(number))  # what one has written, the next one reads
        results = run_distributed(read, world_size, path, engines, again, number % 2 == 1)
        for loaded, after in results:
            assert difference(loaded, saved) == 0.0, engines
            assert difference(after, later) < 1e-4, engines
        path = again


def dropped() -> list[float]:
    """Return what dropout leaves of ones: the same for the same state of the generator."""
    return torch.nn.functional.dropout(torch.ones(64)).tolist()


def write_seeded(path: str, engines: dict[str, Any]) -> list[float]:
    accelerator = build(**engines)
    set_seed(7, device_specific=True)
    accelerator.save_state(path)
    return dropped()


def read_and_drop(path: str, engines: dict[str, Any]) -> list[float]:
    accelerator = build(**engines)
    accelerator.load_state(path)
    return dropped()


def test_processes_of_one_replica_draw_the_same_after_any_state(tmp_path: Path) -> None:
    replicas, halves = str(tmp_path / "ddp"), str(tmp_path / "tp")
    split = {"tp": {"tp_size": 2}}
    first, second = run_distributed(write_seeded, 2, replicas, {})
    assert first != second
    assert run_distributed(read_and_drop, 2, replicas, split) == [first, first]
    four = [first, first, second, second]
    assert run_distributed(read_and_drop, 4, replicas, split) == four
    assert run_distributed(write_seeded, 4, halves, split) == four
    assert run_distributed(read_and_drop, 4, halves, split) == four
    drawn = run_distributed(read_and_drop, 4, halves, {"fsdp": {}})
    assert drawn[:2] == [first, second]
    assert len(set(map(tuple, drawn))) == 4


class Positioned(DataLoaderShard):
    """A loader that knows its position, as torchdata's do."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"position": 3}


def keep_positions(path: str) -> None:
    plain, split = build(), build(tp={"tp_size": 2})
    for accelerator in (plain, split):
        accelerator._objects.dataloaders.append(Positioned([1]))
    plain.save_state(path)
    plain.load_state(path)
    with pytest.raises(CheckpointError, match="as many processes and replicas"):
        split.load_state(path)
    split.save_state(path)
    split.load_state(path)


def test_a_position_is_of_the_same_share_of_the_data(tmp_path: Path) -> None:
    run_distributed(keep_positions, 2, str(tmp_path / "state"))


class Extra(torch.nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_the_extra_state_of_a_module_is_saved() -> None:
    accelerator = build(fsdp={})
    model = accelerator.prepare(Extra(2, 2))
    state = accelerator.strategy.state.model_state(model)
    assert state["_extra_state"] == {"seen": 3}
    accelerator.strategy.state.load_model_state(model, state)
    assert model.seen == 3
    accelerator.end_training()
