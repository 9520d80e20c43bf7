"""What a sharded state holds besides shards is read back as it was, on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from accel import Accelerator
from accel.checkpoint import sharded
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import CheckpointError
from tests.helpers import run_distributed

VALUES: dict[str, Any] = {
    "counts": {1: 0.5, 3: 0.7},
    "empty": {},
    "nested": [{}, {"a": 1}, [[1, 2], {}]],
    "pair": (1, {2: 3}),
    "plain": [1, 2],
}


class Model(torch.nn.Module):
    """A module with statistics, and with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("drift", torch.zeros(8))
        self.extra: Any = VALUES

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.drift += inputs.mean()
        return self.norm(self.layer(inputs))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def trained() -> tuple[Accelerator, Any, Any]:
    """Return a run after a step on data that differ between ranks."""
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator, model = Accelerator(cpu=True, fsdp_plugin=plugin), Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    accelerator.backward(model(torch.randn(8, 3, generator=generator)).square().sum())
    optimizer.step()
    return accelerator, model, optimizer


def state_of(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = optimizer.optimizer.state[optimizer.param_groups[0]["params"][0]]
    return found


def buffers_and_values(folder: str) -> tuple[list[list[torch.Tensor]], Any]:
    """Return buffers before and after loading, and values that are no tensors after it."""
    accelerator, model, optimizer = trained()
    state_of(optimizer).update(VALUES)
    optimizer.param_groups[0]["options"] = VALUES
    accelerator.save_state(folder)
    own = [[buffer.clone() for buffer in model.buffers()]]
    model.extra = None
    accelerator.load_state(folder)
    own.append([buffer.clone() for buffer in model.buffers()])
    state = {name: state_of(optimizer)[name] for name in VALUES}
    values = state, optimizer.param_groups[0]["options"], model.extra
    accelerator.end_training()
    return own, values


def test_buffers_are_of_rank_0_and_containers_are_read_back_as_they_were(tmp_path: Path) -> None:
    first, second = run_distributed(buffers_and_values, 2, str(tmp_path))
    (before, after), values = first
    assert values == (VALUES, VALUES, VALUES)
    (other, loaded), values = second
    assert values == (VALUES, VALUES, VALUES)
    assert not any(map(torch.equal, before[:3], other[:3]))
    assert all(map(torch.equal, after, before))
    assert all(map(torch.equal, loaded, before))


class Point(NamedTuple):
    x: int


def refused(folder: str) -> list[str]:
    """Return the errors for values that could not be read back."""
    accelerator, _, optimizer = trained()
    state, words = state_of(optimizer), []
    for name, value in (("point", Point(1)), ("pair", (state["exp_avg"], state["exp_avg_sq"]))):
        state[name] = value
        with pytest.raises(CheckpointError) as refusal:
            accelerator.save_state(folder)
        words.append(str(refusal.value))
        del state[name]
    accelerator.end_training()
    return words


def test_what_would_be_read_back_otherwise_is_refused(tmp_path: Path) -> None:
    for point, pair in run_distributed(refused, 2, str(tmp_path / "state")):
        assert "['point'] is a tests.accel.checkpoint.test_sharded_state.Point" in point
        assert "['pair'] is a tuple: shards lie in lists" in pair
    assert os.listdir(tmp_path) == []


def hooked(folder: str, main: bool) -> list[str] | str:
    """Save with a hook that takes the model out on the main process only, or on the others."""
    accelerator, *_ = trained()

    def hook(models: Any, weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process == main:
            weights.pop()

    accelerator.register_save_state_pre_hook(hook)
    try:
        accelerator.save_state(folder)
        found: list[str] | str = sorted(entry.name for entry in Path(folder).iterdir())
    except CheckpointError as error:
        found = str(error)
    accelerator.end_training()
    return found


def test_hooks_may_take_models_out_on_the_main_process_only(tmp_path: Path) -> None:
    for names in run_distributed(hooked, 2, str(tmp_path / "main"), True):
        assert "optimizer_0" in names
        assert "pytorch_model_fsdp_0" not in names
    for words in run_distributed(hooked, 2, str(tmp_path / "others"), False):
        assert "pytorch_model_fsdp_0 of a pre-hook of save_state" in words
    assert os.listdir(tmp_path) == ["main"]


def of_different_kinds(folder: str) -> str:
    """Return the error where one rank would save shards, and the other full state dicts."""
    accelerator, *_ = trained()
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    plugin.set_state_dict_type(("FULL", "SHARDED")[accelerator.process_index] + "_STATE_DICT")
    with pytest.raises(CheckpointError) as refusal:
        accelerator.save_state(folder)
    accelerator.end_training()
    return str(refusal.value)


def test_ranks_save_one_kind_of_state_dict(tmp_path: Path) -> None:
    for words in run_distributed(of_different_kinds, 2, str(tmp_path / "state")):
        assert "rank 0: state dicts: full; rank 1: state dicts: sharded" in words


def test_names_that_begin_with_model_stay_as_they_are(tmp_path: Path) -> None:
    weights = {"model.weight": torch.ones(2)}
    dcp.save(weights, checkpoint_id=tmp_path / "alone", no_dist=True)
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "nested", no_dist=True)
    for folder in tmp_path.iterdir():
        assert sharded.read_model_folder(folder).keys() == weights.keys()
