"""Tensors on the meta device that came after the hooks: nothing computes with them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import cpu_offload, disk_offload, dispatch_model
from accel.hooks import ModelHook, add_hook_to_module
from accel.machine.errors import StateError
from accel.utils import align_module_device
from tests.accel.weights.models import inputs, net


class Adapter(nn.Module):
    """A layer with an adapter beside it, made where the weight of the layer lies, as by peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.added = nn.Linear(4, 4, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.added(x)
        return out


class Wrapper(nn.Module):
    """Runs a model, as the class of peft does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out


def offloaded(kind: str, folder: Path) -> nn.Module:
    """Return `net` with its last block offloaded, and maybe others."""
    if kind == "cpu":
        return cpu_offload(net(), "cpu", offload_buffers=True)
    if kind == "disk":
        return disk_offload(net(), folder, "cpu")
    devices = {"": "disk"} if kind == "everything" else {"0": "cpu", "1": "disk"}
    return dispatch_model(net(), devices, offload_dir=folder)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "disk", "everything", "blocks"])
def test_an_adapter_without_values_is_refused(kind: str, before: bool, tmp_path: Path) -> None:
    model = offloaded(kind, tmp_path)
    if before:  # the model ran when it had no adapter
        model(inputs())
    model[1].linear = Adapter(model[1].linear)
    message = r"1\.linear\.added\.weight, 1\.linear\.added\.bias of Sequential.*before dispatch"
    for _ in range(2):
        with pytest.raises(StateError, match=message):
            Wrapper(model)(inputs())
    model[1].linear.added = nn.Linear(4, 4)
    model[1].linear.added.requires_grad_(False).weight.zero_()
    model[1].linear.added.bias.zero_()
    assert torch.equal(model(inputs()), net()(inputs()))


class Before(Adapter):
    """Runs the adapter before its layer, and in a way of which torch does not complain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x @ self.added.weight.T + self.base(x)
        return out


@pytest.mark.parametrize("kind", ["cpu", "disk", "everything", "blocks"])
@pytest.mark.parametrize("adapter", [Adapter, Before])
def test_an_adapter_without_values_is_refused_where_a_part_runs(
    kind: str, adapter: type[Adapter], tmp_path: Path
) -> None:
    model = offloaded(kind, tmp_path)
    expected = model[1](inputs())
    for changed in (model, copy.deepcopy(model)):
        changed[1].linear = adapter(changed[1].linear)
        for part in (changed[1], changed[1].linear):
            with pytest.raises(StateError, match=r"added\.weight.*before dispatch"):
                part(inputs())
        added = nn.Linear(4, 4).requires_grad_(False)
        added.weight.zero_()
        added.bias.zero_()
        changed[1].linear.added = added
        assert torch.equal(changed[1](inputs()), expected)


def test_an_adapter_around_a_container_is_refused_where_a_part_runs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    disk_offload(model, tmp_path, "cpu")
    around = Adapter(model[0][0])
    around.base = model[0]
    model[0] = nn.Sequential(around)
    with pytest.raises(StateError, match=r"added\.weight"):
        model[0](inputs())
    part = cpu_offload(net(), "cpu", preload_module_classes=["Block"])
    part[1].linear = Adapter(part[1].linear)
    with pytest.raises(StateError, match=r"linear\.added\.weight"):
        part[1](inputs())


def test_a_part_that_was_moved_or_outlives_its_model_runs(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path, "cpu")
    expected = model[1](inputs())
    moved = nn.Sequential(model[1])
    model[1] = nn.Identity()
    assert torch.equal(moved(inputs()), expected)
    assert torch.equal(copy.deepcopy(moved)(inputs()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(moved))(inputs()), expected)
    del model
    assert torch.equal(moved(inputs()), expected)


def test_weights_that_hooks_around_have_are_none(tmp_path: Path) -> None:
    model = cpu_offload(net(), "cpu", offload_buffers=True, preload_module_classes=["Block"])
    assert torch.equal(model(inputs()), net()(inputs()))
    model[1].linear = Adapter(model[1].linear)
    with pytest.raises(StateError, match="added"):
        model(inputs())


def test_hooks_of_others_may_have_values() -> None:
    class Fills(ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            module.weight = nn.Parameter(torch.eye(4))
            return args, kwargs

    model = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    added = nn.Linear(4, 4, bias=False, device="meta")
    add_hook_to_module(added, Fills())
    model.append(added)
    assert torch.equal(model(inputs()), net()(inputs()))


def test_weights_that_are_loaded_by_hand_are_not_looked_through(tmp_path: Path) -> None:
    """As to fill adapters: peft loads the weights of a module without a forward pass."""
    model = disk_offload(net()[0], tmp_path, "cpu")
    model.linear = Adapter(model.linear)
    with align_module_device(model):
        assert not model.get_parameter("scale").is_meta
    with pytest.raises(StateError, match="added"):
        model(inputs())
