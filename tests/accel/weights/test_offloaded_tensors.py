"""Tensors that stand for offloaded weights: nothing is saved or computed without their values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model, load_checkpoint_in_model
from accel.hooks import remove_hook_from_submodules
from accel.machine.errors import CheckpointError, StateError
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Tied, inputs, net

HALF = {"0": "cpu", "1": "disk"}
OFFLOADS: list[Callable[[nn.Module, Path], nn.Module]] = [
    lambda model, folder: cpu_offload(model, "cpu", offload_buffers=True),
    lambda model, folder: disk_offload(model, folder, "cpu"),
    lambda model, folder: dispatch_model(model, HALF, offload_dir=folder, offload_buffers=True),
]
RULE = r"offloaded weight \[.*without their values.*save_model.*get_state_dict_offloaded_model"


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_state_dict_is_not_saved_without_its_values(offload: Any, tmp_path: Path) -> None:
    model = offload(net(), tmp_path / "off")
    with pytest.raises(StateError, match=RULE):
        torch.save(model.state_dict(), tmp_path / "lost.pt")
    with pytest.raises(StateError, match=RULE):
        torch.save({"model": model.half().state_dict(), "step": 3}, io.BytesIO())
    with pytest.raises(StateError, match=RULE):
        pickle.dumps({n: v.detach().clone() for n, v in model.state_dict().items()})
    with pytest.raises(StateError, match=RULE):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "lost.safetensors")
    with pytest.raises(StateError, match=RULE):
        {name: value.cpu() for name, value in model.state_dict().items()}


def test_the_remedy_of_a_file_of_safetensors_saves_the_values(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), cpu_offload(net(), "cpu")
    rule = r"\(meta\): .*offloaded weights .*save_model\(model"
    with pytest.raises(CheckpointError, match=rule) as caught:
        accelerator.save(model.state_dict(), tmp_path / "lost", safe_serialization=True)
    assert "safe_serialization=False" not in str(caught.value)


def test_an_offloaded_buffer_is_not_saved_without_its_values() -> None:
    model = cpu_offload(nn.BatchNorm1d(4), "cpu", offload_buffers=True)
    with pytest.raises(StateError, match=RULE):
        torch.save(model.state_dict()["running_mean"], io.BytesIO())


def test_no_name_of_a_tied_weight_is_saved_without_its_values() -> None:
    model = cpu_offload(Tied(), "cpu")
    for name in ("embedding.weight", "head.weight"):
        with pytest.raises(StateError, match=RULE):
            pickle.dumps(model.state_dict()[name])


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_what_has_the_values_is_saved_and_copied(offload: Any, copied: Any, tmp_path: Path) -> None:
    model = copied(offload(net(), tmp_path / "off"))
    assert torch.equal(model(inputs()), net()(inputs()))
    with pytest.raises(StateError, match=RULE):  # a copy's state dict is no safer
        torch.save(model.state_dict(), io.BytesIO())
    torch.save(get_state_dict_offloaded_model(model), tmp_path / "full.pt")
    fresh = net()
    nn.init.zeros_(fresh[0].linear.weight)
    fresh.load_state_dict(torch.load(tmp_path / "full.pt", weights_only=True))
    assert torch.equal(fresh(inputs()), net()(inputs()))
    Accelerator(cpu=True).save_model(model, tmp_path / "weights")
    nn.init.zeros_(fresh[0].linear.weight)
    load_checkpoint_in_model(fresh, tmp_path / "weights", strict=True)
    assert torch.equal(fresh(inputs()), net()(inputs()))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_state_dict_is_looked_at_and_loaded_again(offload: Any, tmp_path: Path) -> None:
    model = offload(net(), tmp_path / "off")
    state = model.state_dict()
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in net().state_dict().items()
    }
    assert not model.load_state_dict(state).missing_keys
    assert not model.load_state_dict(copy.deepcopy(state)).missing_keys
    assert torch.equal(model(inputs()), net()(inputs()))
    with pytest.raises(RuntimeError, match=RULE):
        net().load_state_dict(state)
    with pytest.raises(StateError, match=RULE):
        torch.ones(4, 4) @ state["1.linear.weight"]
    for use in (torch.Tensor.numpy, torch.Tensor.tolist, lambda value: value[0, 0].item()):
        with pytest.raises(StateError, match=RULE):
            use(state["1.linear.weight"])
    remove_hook_from_submodules(model)
    torch.save(model.state_dict(), tmp_path / "full.pt")


def test_a_weight_on_a_device_is_saved(tmp_path: Path) -> None:
    model = dispatch_model(net(), HALF, offload_dir=tmp_path)
    resident = {name: value for name, value in model.state_dict().items() if name[0] == "0"}
    torch.save(resident, tmp_path / "resident.pt")
    assert type(resident["0.scale"]) is torch.Tensor


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("move", [nn.Module.cpu, lambda m: m.cpu(), lambda m: m.to("cpu")])
def test_an_offloaded_model_is_not_moved(offload: Any, move: Any, tmp_path: Path) -> None:
    model = offload(net(), tmp_path)
    rule = r"You can't move a model .*remove_hook_from_submodules\(model\)"
    for module in (model, nn.Sequential(model), model[1].linear):
        with pytest.raises(StateError, match=rule):
            move(module)
    assert torch.equal(model(inputs()), net()(inputs()))
    remove_hook_from_submodules(model)
    assert move(model) is model


@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_weights_get_another_dtype(offload: Any, tmp_path: Path) -> None:
    model, expected = offload(net(), tmp_path), net().to(torch.float64)
    x = inputs().double()
    assert model.to(torch.float64, non_blocking=True) is model
    assert torch.equal(model(x), expected(x))
