"""E4: offloaded weights are there for the forward pass alone; assigned ones are kept or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model
from accel.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel.machine.errors import StateError
from accel.utils.modeling import get_state_dict_offloaded_model
from accel.weights import read_ahead
from tests.accel.weights.models import Block, Dispatch, inputs, net, on_meta

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


def test_an_offloaded_weight_does_not_train() -> None:
    module = nn.Linear(4, 4)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    out = module(inputs())
    with pytest.raises(StateError, match="gradient of an offloaded weight"):
        out.sum().backward()


# -- one weight under several names --------------------------------------------------------


def layers() -> nn.Sequential:
    """Return layers large enough to be read ahead."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(600, 600) for _ in range(6)]).requires_grad_(False)


def test_a_failed_forward_pass_leaves_nothing_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 1)
    model = disk_offload(layers(), tmp_path, "cpu")
    expected = layers()(torch.ones(1, 600))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(torch.ones(1, 600)), expected)


ASSIGNED_OFFLOADS: list[Dispatch] = [
    lambda model, folder: cpu_offload(model, "cpu"),
    lambda model, folder: disk_offload(model, folder, "cpu"),
]
offloads = pytest.mark.parametrize("offload", ASSIGNED_OFFLOADS)


def two(offload: Dispatch, folder: Path) -> Any:
    return offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), folder / "off")


def removed(model: Any, folder: Path) -> torch.Tensor:
    remove_hook_from_submodules(model)
    weight: torch.Tensor = model[0].weight
    return weight


def dispatched(model: Any, folder: Path) -> torch.Tensor:
    dispatch_model(model, {"": "disk"}, offload_dir=folder / "other")
    return get_state_dict_offloaded_model(model)["0.weight"]


def saved(model: Any, folder: Path) -> torch.Tensor:
    Accelerator(cpu=True).save_model(model, folder / "saved")
    return load_file(folder / "saved" / "model.safetensors")["0.weight"]


@offloads
@pytest.mark.parametrize("used", [removed, dispatched, saved])
def test_an_assigned_value_is_the_value(
    offload: Dispatch, used: Callable[[Any, Path], torch.Tensor], tmp_path: Path
) -> None:
    model = two(offload, tmp_path)
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
        model(torch.ones(1, 4))
    assert torch.equal(used(model, tmp_path), torch.ones(4, 4))
