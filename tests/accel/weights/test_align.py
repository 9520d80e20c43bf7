"""The hook that brings inputs and weights to one device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accel.machine.errors import StateError
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Block, inputs, net, on_meta

PARAMETERS = {"scale", "norm.weight", "norm.bias", "linear.weight", "linear.bias"}


def block() -> Block:
    found = net()[0]
    assert isinstance(found, Block)
    return found


def test_inputs_and_weights_go_to_the_device() -> None:
    module = nn.Linear(4, 4)
    add_hook_to_module(module, AlignDevicesHook(execution_device="meta"))
    assert module.weight.is_meta
    assert module(inputs()).is_meta
    nested = nn.Identity()
    add_hook_to_module(nested, AlignDevicesHook("meta"))
    out = nested([{"x": inputs()}, (inputs(), 3)])
    assert out[0]["x"].is_meta
    assert out[1][0].is_meta
    assert out[1][1] == 3


def test_weights_are_there_for_the_forward_pass_alone() -> None:
    module, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(module.state_dict())
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    assert on_meta(module) == {"weight", "bias"}
    out = module(inputs())
    assert on_meta(module) == {"weight", "bias"}
    assert torch.equal(out, plain(inputs()))
    remove_hook_from_module(module)
    assert on_meta(module) == set()
    assert torch.equal(module(inputs()), plain(inputs()))


def test_weights_may_come_from_a_mapping() -> None:
    module = nn.Linear(4, 4, bias=False).to("meta")
    weights = {"weight": torch.eye(4)}
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert torch.equal(module(inputs()), inputs())
    remove_hook_from_module(module)
    assert torch.equal(module(inputs()), inputs())


def test_outputs_may_go_to_the_device_of_the_inputs() -> None:
    class Second(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return y

    for same in (True, False):
        module = Second()
        add_hook_to_module(module, AlignDevicesHook(io_same_device=same))
        assert module(inputs().to("meta"), inputs()).is_meta is same


def test_buffers_stay_unless_they_are_offloaded() -> None:
    for buffers in (True, False):
        module = nn.BatchNorm1d(4).eval()
        module.register_buffer("mask", torch.ones(1), persistent=False)
        hook = AlignDevicesHook("cpu", offload=True, offload_buffers=buffers)
        add_hook_to_module(module, hook)
        assert ("running_mean" in on_meta(module)) is buffers
        assert "mask" not in on_meta(module)
        assert torch.allclose(module(inputs()), inputs(), atol=1e-4)


def test_weights_of_submodules_may_be_included() -> None:
    for whole in (True, False):
        module = block()
        hook = AlignDevicesHook("cpu", offload=True, place_submodules=whole)
        add_hook_to_module(module, hook)
        assert on_meta(module) == (PARAMETERS if whole else {"scale"})
        assert torch.equal(module(inputs()), block()(inputs()))


@pytest.mark.parametrize("keys", ["kept", ["kept", "other"]])
def test_some_arguments_stay(keys: Any) -> None:
    class Named(nn.Module):
        def forward(self, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
            return kwargs

    module = Named()
    add_hook_to_module(module, AlignDevicesHook("meta", skip_keys=keys))
    out = module(kept=inputs(), moved=inputs())
    assert (out["kept"].is_meta, out["moved"].is_meta) == (False, True)


def test_copies_of_tied_weights_are_shared() -> None:
    value = torch.eye(4)
    copies: dict[int, dict[torch.device, torch.Tensor]] = {value.data_ptr(): {}}
    seen = []
    for _ in range(2):
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(value)
        add_hook_to_module(module, AlignDevicesHook("cpu", tied_params_map=copies))
        seen.append(module.weight)
    assert seen[0] is seen[1]
    # Copies that a forward pass made go with it.
    copies = {value.data_ptr(): {}}
    hook = AlignDevicesHook("cpu", True, weights_map={"weight": value}, tied_params_map=copies)
    add_hook_to_module(module, hook)
    watched = []
    old = module._old_forward
    module._old_forward = lambda x: (watched.append(len(copies[value.data_ptr()])), old(x))
    module(inputs())
    assert watched == [1]
    assert copies == {value.data_ptr(): {}}


def test_some_weights_stay_as_they_train() -> None:
    module = nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    add_hook_to_module(module, AlignDevicesHook("cpu", True, kept=frozenset(["bias"])))
    assert on_meta(module) == {"weight"}
    module(inputs()).sum().backward()
    assert module.bias.grad is not None


def test_an_offloaded_weight_does_not_train() -> None:
    module = nn.Linear(4, 4)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    out = module(inputs())
    with pytest.raises(StateError, match="gradient of an offloaded weight"):
        out.sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_loads_its_own_weights(copied: Any) -> None:
    module = nn.Linear(4, 4)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    other = copied(module)
    assert torch.equal(other(inputs()), module(inputs()))
    assert on_meta(other) == {"weight", "bias"}


def test_a_hook_shows_its_options() -> None:
    hook = AlignDevicesHook("cpu", offload=True, skip_keys="x")
    assert "execution_device=cpu, offload=True" in repr(hook)
    with pytest.raises(StateError, match="not attached"):
        hook.weight("x")


# -- one weight under several names --------------------------------------------------------


class Twice(nn.Module):
    """A module that has one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(4, 4))
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.second is self.first
        return x @ self.first @ self.second


@pytest.mark.parametrize("loaded", [True, False])
def test_a_weight_is_loaded_under_all_its_names(loaded: bool) -> None:
    plain = Twice()
    with torch.device("meta"):
        module = copy.deepcopy(plain) if loaded else Twice()
    weights = {"first": plain.first.detach()}
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    for _ in range(2):
        assert module.second.is_meta
        assert torch.equal(module(inputs()), plain(inputs()))
    state = get_state_dict_offloaded_model(module)
    assert torch.equal(state["first"], plain.first)
    assert torch.equal(state["second"], plain.first)
    remove_hook_from_module(module)
    assert module.second is module.first
    assert torch.equal(module.first, plain.first)


def test_buffers_have_several_names_too() -> None:
    plain = nn.Module()
    plain.register_buffer("first", torch.rand(4))
    plain.register_buffer("second", plain.get_buffer("first"))
    module = copy.deepcopy(plain)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, offload_buffers=True))
    module.get_submodule("")._hf_hook.pre_forward(module)  # type: ignore[operator, union-attr]
    assert torch.equal(module.get_buffer("second"), plain.get_buffer("first"))
