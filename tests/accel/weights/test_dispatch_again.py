"""A model that is dispatched again lies and runs where the last dispatch says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel.utils import set_module_tensor_to_device
from accel.weights.hooks import hooks_of
from tests.accel.weights.models import Tied, inputs, net, on_meta

MAPS: list[dict[str, Any]] = [
    {"0": "disk", "1": "cpu"},
    {"": "cpu"},
    {"": "disk"},
    {"0": "cpu", "1": "disk"},
    {"0.norm": "disk", "": "cpu"},
]


def hooks(model: nn.Module) -> list[int]:
    return [len(hooks_of(module)) for module in model.modules()]


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("second", MAPS)
def test_the_last_map_holds(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    once = dispatch_model(net(), second, offload_dir=tmp_path / "once")
    model = dispatch_model(net(), first, offload_dir=tmp_path / "one")
    model(inputs())
    for folder in ("one", "other", "other"):
        dispatch_model(model, second, offload_dir=tmp_path / folder)
        assert model.hf_device_map == second
        for _ in range(2):
            assert torch.equal(model(inputs()), net()(inputs()))
        assert on_meta(model) == on_meta(once)
        assert hooks(model) == hooks(once)
    if second == {"": "cpu"}:
        model.load_state_dict(net().state_dict())
        assert "to" not in vars(model)


@pytest.mark.parametrize("second", MAPS)
def test_weights_that_were_never_in_memory_are_found(
    second: dict[str, Any], tmp_path: Path
) -> None:
    Accelerator(cpu=True).save_model(net(), tmp_path / "weights")
    with init_empty_weights():
        model = net()
    load_checkpoint_and_dispatch(
        model, tmp_path / "weights", device_map=MAPS[0], offload_folder=tmp_path / "off"
    )
    expected = model(inputs())
    dispatch_model(model, second, offload_dir=tmp_path / "again")
    assert torch.equal(model(inputs()), expected)


@pytest.mark.parametrize(
    "second", [{"": "cpu"}, {"": "disk"}, {"block": "disk", "": "cpu"}, {"head": "disk", "": "cpu"}]
)
def test_ties_survive(second: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = Tied().eval(), torch.tensor([1, 2])
    expected = copy.deepcopy(model)(tokens)
    dispatch_model(model, {"block": "cpu", "": "disk"}, offload_dir=tmp_path)
    dispatch_model(model, second, offload_dir=tmp_path)
    assert torch.equal(model(tokens), expected)
    dispatch_model(model, {"": "cpu"})
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(tokens), expected)


def test_offloading_again_undoes_the_first(tmp_path: Path) -> None:
    once = hooks(cpu_offload(net(), "cpu"))
    model = disk_offload(net(), tmp_path / "one", "cpu")
    for _ in range(2):
        cpu_offload(model, "cpu")
        assert hooks(model) == once
        assert torch.equal(model(inputs()), net()(inputs()))
        disk_offload(model, tmp_path / "two", "cpu")
        assert hooks(model) == once
        assert torch.equal(model(inputs()), net()(inputs()))


def test_hooks_of_others_stay(tmp_path: Path) -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    model = disk_offload(net(), tmp_path, "cpu")
    add_hook_to_module(model[1], Doubling(), append=True)
    for _ in range(2):
        add_hook_to_module(model[0].norm, ModelHook(), append=True)
    dispatch_model(model, {"": "cpu"})
    assert torch.equal(model(inputs()), net()(inputs()) * 2)
    assert hooks(model[0]) == [0, 2, 0]
    assert isinstance(model[1]._hf_hook, Doubling)


def test_what_was_written_in_between_is_kept(tmp_path: Path) -> None:
    model, expected = disk_offload(net(), tmp_path, "cpu"), net()
    set_module_tensor_to_device(model, "1.linear.bias", "cpu", value=torch.ones(4))
    expected[1].linear.bias.data.fill_(1)
    disk_offload(model, tmp_path, "cpu")
    assert torch.equal(model(inputs()), expected(inputs()))


def from_disk(model: nn.Module, folder: Path, **options: Any) -> nn.Module:
    """Dispatch a model to disk that never had its weights in memory; `model` has their values."""
    Accelerator(cpu=True).save_model(model, folder / "weights")
    with init_empty_weights():
        empty = copy.deepcopy(model).to("meta")
    return load_checkpoint_and_dispatch(
        empty, folder / "weights", {"": "disk"}, offload_folder=folder / "off", **options
    )


class Writes(nn.Embedding):
    """An embedding whose forward pass changes its weight, as that of `max_norm` does."""

    def __init__(self) -> None:
        super().__init__(3, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.data = self.weight.data / 2
        return super().forward(tokens)


def zeroed(model: nn.Module) -> None:
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.zeros(4, 4))


def trained(model: nn.Module) -> None:
    model.train()(torch.tensor([0, 2]))
    model.eval()


@pytest.mark.parametrize(
    ("layers", "edit", "x"),
    [
        ([nn.Linear(4, 4), nn.Linear(4, 4)], zeroed, inputs()),
        ([nn.Embedding(3, 4), nn.BatchNorm1d(4)], trained, torch.tensor([0, 1])),
        ([Writes()], trained, torch.tensor([0, 1])),
    ],
)
@pytest.mark.parametrize("second", [{"": "cpu"}, {"": "disk"}])
def test_what_lies_in_memory_alone_is_kept_where_hooks_are_removed(
    layers: list[nn.Module],
    edit: Callable[[nn.Module], None],
    x: torch.Tensor,
    second: dict[str, Any],
    tmp_path: Path,
) -> None:
    model = from_disk(nn.Sequential(*layers).eval(), tmp_path, offload_buffers=True)
    before = model(x).detach()
    edit(model)
    expected = model(x).detach()
    assert not torch.allclose(before, expected)
    remove_hook_from_submodules(model)
    dispatch_model(model, second, offload_dir=tmp_path / "off")
    assert torch.allclose(model(x), expected)  # the address of a weight decides the kernel
