"""Checkpoints that are loaded into a model that is dispatched already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import ModelHook, add_hook_to_module
from accel.machine.errors import CheckpointError, ConfigError
from accel.utils.modeling import get_state_dict_offloaded_model
from accel.weights.hooks import hooks_of
from tests.accel.weights.models import TO_DISK, Dispatch, Tied, inputs, net

DISPATCHES: list[Dispatch] = [
    *TO_DISK,
    lambda model, folder: cpu_offload(model, "cpu"),
    lambda model, folder: dispatch_model(
        model, {"0": "cpu", "1": "disk"}, offload_dir=folder, offload_buffers=True
    ),
]
MAPS: list[Any] = [{"": "disk"}, {"": "cpu"}, {"0": "disk", "1": "cpu"}, "auto"]


def other() -> nn.Sequential:
    """Return a model like `net` with other weights, and the same buffers that no file has."""
    model = net()
    for parameter in model.parameters():
        parameter.data.add_(1)
    model[0].norm.running_mean.add_(1)
    return model


def saved(model: nn.Module, folder: Path) -> Path:
    Accelerator(cpu=True).save_model(model, folder)
    return folder


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("folder", ["one", "other"])
def test_the_new_weights_are_computed_with(
    dispatch: Dispatch, device_map: Any, folder: str, tmp_path: Path
) -> None:
    model = dispatch(net(), tmp_path / "one")
    model(inputs())
    load_checkpoint_and_dispatch(
        model,
        saved(other(), tmp_path / "weights"),
        device_map=device_map,
        max_memory={"cpu": 10**9} if device_map == "auto" else None,
        offload_folder=tmp_path / folder,
        strict=True,
    )
    assert torch.equal(model(inputs()), other()(inputs()))
    found, wanted = get_state_dict_offloaded_model(model), other().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert all(len(hooks_of(module)) <= 2 for module in model.modules())


def test_in_two_calls(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    weights = saved(other(), tmp_path / "weights")
    off = tmp_path / "off"
    load_checkpoint_in_model(model, weights, {"": "disk"}, offload_folder=off)
    assert not any(hooks_of(module) for module in model.modules())
    dispatch_model(model, {"": "disk"}, offload_dir=off)
    assert torch.equal(model(inputs()), other()(inputs()))


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}])
@pytest.mark.parametrize("first", [{"": "disk"}, {"head": "disk", "": "cpu"}])
def test_ties_are_known(first: dict[str, Any], device_map: dict[str, Any], tmp_path: Path) -> None:
    source, model = Tied().eval(), Tied().eval()
    model.block.shift.copy_(source.block.shift)
    weights = saved(source, tmp_path / "weights")  # one of the names
    dispatch_model(model, first, offload_dir=tmp_path / "one")
    load_checkpoint_and_dispatch(
        model, weights, device_map=device_map, offload_folder=tmp_path / "off", strict=True
    )
    tokens = torch.tensor([1, 2])
    assert torch.equal(model(tokens), source(tokens))
    found = get_state_dict_offloaded_model(model)
    assert torch.equal(found["head.weight"], found["embedding.weight"])


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}])
def test_files_of_the_old_weights_may_be_gone(device_map: dict[str, Any], tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    for file in (tmp_path / "one").iterdir():
        file.unlink()
    weights = saved(other(), tmp_path / "weights")
    load_checkpoint_and_dispatch(
        model, weights, device_map=device_map, offload_folder=tmp_path / "off", strict=True
    )
    assert torch.equal(model(inputs()), other()(inputs()))


def test_weights_of_others_stay_as_they_are(tmp_path: Path) -> None:
    mine = {name: value.clone() for name, value in net().state_dict().items()}
    model = cpu_offload(net(), "cpu", state_dict=mine)
    weights = saved(other(), tmp_path / "weights")
    load_checkpoint_and_dispatch(model, weights, device_map={"": "cpu"}, strict=True)
    assert torch.equal(model(inputs()), other()(inputs()))
    assert all(torch.equal(mine[name], value) for name, value in net().state_dict().items())


def test_what_the_checkpoint_lacks_is_kept(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    save_file({"0.scale": torch.ones(4)}, tmp_path / "some.safetensors")
    load_checkpoint_and_dispatch(
        model, tmp_path / "some.safetensors", {"": "disk"}, offload_folder=tmp_path / "off"
    )
    expected = net()
    expected[0].scale.data.fill_(1)
    assert torch.equal(model(inputs()), expected(inputs()))
    assert "0.scale" in json.loads((tmp_path / "off" / "index.json").read_text())


def test_what_is_refused_leaves_the_model_dispatched(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    before = model._hf_hook
    save_file({"0.scale": torch.ones(5)}, tmp_path / "wrong.safetensors")
    with pytest.raises(CheckpointError, match="wrong shapes"):
        load_checkpoint_and_dispatch(model, tmp_path / "wrong.safetensors", {"": "cpu"})
    with pytest.raises(ConfigError, match="device_map='automatic'"):
        load_checkpoint_and_dispatch(model, tmp_path / "wrong.safetensors", "automatic")
    assert model._hf_hook is before
    assert torch.equal(model(inputs()), net()(inputs()))


def test_hooks_of_others_stay(tmp_path: Path) -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    model = disk_offload(net(), tmp_path / "one", "cpu")
    add_hook_to_module(model[1], Doubling(), append=True)
    weights = saved(other(), tmp_path / "weights")
    load_checkpoint_and_dispatch(model, weights, {"": "disk"}, offload_folder=tmp_path / "off")
    assert torch.equal(model(inputs()), other()(inputs()) * 2)
