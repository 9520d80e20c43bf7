"""Weights of a model whose hooks offload them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel import cpu_offload, disk_offload, init_empty_weights
from accel.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from accel.machine.errors import StateError
from accel.utils import (
    align_module_device,
    has_offloaded_params,
    load_offloaded_weights,
    offload_weight,
)
from accel.utils.modeling import get_state_dict_from_offload, get_state_dict_offloaded_model
from tests.accel.weights.models import Tied, inputs, net, on_meta


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_offloaded_parameters_are_noticed() -> None:
    model = net()
    assert not has_offloaded_params(model[0])
    cpu_offload(model, "cpu")
    assert has_offloaded_params(model[0])
    assert not has_offloaded_params(model)
    add_hook_to_module(model[0], ModelHook(), append=True)
    assert has_offloaded_params(model[0])


def test_a_module_is_on_a_device_for_a_while() -> None:
    module = nn.Linear(2, 2)
    before, value = module.weight, module.bias.clone()
    with align_module_device(module, "meta"):
        assert module.weight.is_meta
    with align_module_device(module):
        assert module.weight is before
    assert module.weight is before
    assert torch.equal(module.bias, value)


def test_offloaded_weights_are_loaded_for_a_while() -> None:
    model = cpu_offload(net(), "cpu")
    with align_module_device(model[0].linear):
        assert torch.equal(model[0].linear.weight, net()[0].linear.weight)
    assert model[0].linear.weight.is_meta
    with align_module_device(model[0].linear, "meta"):
        assert model[0].linear.weight.is_meta
    assert torch.equal(model(inputs()), net()(inputs()))


def test_a_state_dict_has_what_is_offloaded(tmp_path: Path) -> None:
    for model in (cpu_offload(net(), "cpu"), disk_offload(net(), tmp_path, "cpu"), net()):
        assert same(get_state_dict_offloaded_model(model), net().state_dict())
    torch.manual_seed(1)
    tied = Tied().eval()
    full = {name: value.clone() for name, value in tied.state_dict().items()}
    cpu_offload(tied, "cpu", offload_buffers=True)
    assert same(get_state_dict_offloaded_model(tied), full)


def test_a_state_dict_without_data_is_refused() -> None:
    with init_empty_weights():
        model = nn.Linear(2, 2)
    with pytest.raises(StateError, match="weight"):
        get_state_dict_offloaded_model(model)


def test_weights_of_one_module_go_to_a_state_dict() -> None:
    model = cpu_offload(net(), "cpu")
    for module, name in ((model[0].linear, "0.linear.weight"), (model[1], "1.scale")):
        found = get_state_dict_from_offload(module, name, {"x": torch.ones(1)})
        assert all(torch.equal(found[n], v) for n, v in net().state_dict().items() if n in found)
        assert {"x", name} <= found.keys()
    away = get_state_dict_from_offload(model[0].linear, "w", {}, device_to_put_offload="meta")
    assert away["weight"].is_meta


def test_offloaded_weights_are_loaded_into_a_model(tmp_path: Path) -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    index = offload_weight(torch.eye(2), "0.weight", tmp_path, {})
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model[0].weight, torch.eye(2))
    assert on_meta(model) == {"0.bias", "1.weight", "1.bias"}
    load_offloaded_weights(model, None, tmp_path)


def test_a_hook_that_offloads_nothing_does_not_count() -> None:
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook("cpu"))
    assert not has_offloaded_params(module)
