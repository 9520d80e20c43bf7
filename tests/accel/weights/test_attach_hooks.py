"""E1: hooks of a whole model place and offload its modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel.hooks import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from tests.accel.weights.models import Direct, hook_of, inputs, net, on_meta

OFFLOADING = [attach_align_device_hook, attach_align_device_hook_on_blocks]


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in net().state_dict().items()}


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": y}


# -- execution devices ---------------------------------------------------------------------


def test_every_module_runs_on_the_device() -> None:
    model = net()
    attach_execution_device_hook(model, "meta")
    assert hooked(model) == [name for name, module in model.named_modules()]
    assert model(inputs()).is_meta
    assert hook_of(model[0]).execution_device == "meta"


@pytest.mark.parametrize("attach", [attach_execution_device_hook, *OFFLOADING])
def test_skipped_keys_stay(attach: Callable[..., None]) -> None:
    model = Keyword()
    attach(model, "cpu", skip_keys="y")
    assert model(inputs(), y=inputs().to("meta"))["y"].is_meta


def test_nothing_is_attached_within_some_classes() -> None:
    model = net()
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Block"])
    assert hooked(model) == ["", "0", "1"]


def test_tied_copies_are_handed_on() -> None:
    copies: dict[int, dict[torch.device, torch.Tensor]] = {1: {}}
    models = [net(), net(), net()]
    attach_execution_device_hook(models[0], "cpu", tied_params_map=copies)
    attach_align_device_hook(models[1], "cpu", tied_params_map=copies)
    attach_align_device_hook_on_blocks(models[2], "cpu", tied_params_map=copies)
    for model in models:
        block: Any = model[0]
        assert hook_of(block.linear).tied_params_map is copies


# -- every module with weights of its own --------------------------------------------------


def test_every_module_offloads_its_own_weights() -> None:
    model = net()
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    assert hooked(model) == ["0", "0.norm", "0.linear", "1", "1.norm", "1.linear"]
    assert on_meta(model) == {name for name, _ in model.named_parameters()}
    assert torch.equal(model(inputs()), net()(inputs()))


def test_modules_run_on_the_execution_device() -> None:
    model = net()
    attach_align_device_hook(model, execution_device="meta")
    assert model(inputs()).is_meta


@pytest.mark.parametrize("attach", OFFLOADING)
def test_buffers_are_offloaded_on_request(attach: Callable[..., None]) -> None:
    model = net()
    attach(model, "cpu", offload=True, offload_buffers=True)
    assert "0.norm.running_mean" in on_meta(model)
    assert torch.equal(model(inputs()), net()(inputs()))


@pytest.mark.parametrize(
    ("attach", "device", "offload"),
    [(OFFLOADING[0], "cpu", True), (OFFLOADING[1], {"1": "cpu"}, {"1": True})],
)
def test_a_part_has_a_name_in_the_mappings(
    attach: Callable[..., None], device: Any, offload: Any
) -> None:
    model = net()
    attach(model[1], device, offload, weights_map=weights(), module_name="1")
    assert torch.equal(model[1](inputs()), model[1].shift.expand(2, 4))


def test_attention_of_torch_loads_all_weights_within() -> None:
    torch.manual_seed(0)
    tokens = torch.rand(2, 3, 4)
    for bias in (True, False):
        plain = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, bias=bias)
        for evaluated in (False, True):
            plain.train(not evaluated)
            model = copy.deepcopy(plain)
            attach_align_device_hook(model, "cpu", offload=True)
            with torch.set_grad_enabled(not evaluated):
                assert torch.allclose(model(tokens), plain(tokens), atol=1e-6)
            assert on_meta(model) == {name for name, _ in plain.named_parameters()}


@pytest.mark.parametrize("attach", OFFLOADING)
def test_a_class_loads_all_weights_within(attach: Callable[..., None]) -> None:
    model = nn.Sequential(Direct())
    plain, state = copy.deepcopy(model), dict(model.state_dict())
    attach(model, "cpu", offload=True, weights_map=state, preload_module_classes=["Direct"])
    assert "0.inner" not in hooked(model)
    assert torch.equal(model(inputs()), plain(inputs()))


# -- blocks --------------------------------------------------------------------------------


def test_blocks_run_where_the_mapping_says() -> None:
    model = net()
    attach_align_device_hook_on_blocks(model, {"0": "cpu", "1": "meta"}, False)
    assert "1.scale" in on_meta(model)
    assert "0.scale" not in on_meta(model)
    assert hook_of(model[0]).place_submodules
    with pytest.raises(NotImplementedError):  # outputs on meta have no data to bring back
        model(inputs())


def test_some_blocks_are_offloaded() -> None:
    model, state = net(), dict(net().state_dict())
    attach_align_device_hook_on_blocks(
        model, {"0": "cpu", "1": "cpu"}, {"0": False, "1": True}, weights_map=state
    )
    assert on_meta(model) == {name for name, _ in model.named_parameters() if name[0] == "1"}
    assert torch.equal(model(inputs()), net()(inputs()))
    everything = net()
    attach_align_device_hook_on_blocks(everything, "cpu", offload=True, weights_map=weights())
    assert on_meta(everything) == {name for name, _ in everything.named_parameters()}
    assert torch.equal(everything(inputs()), everything[1].shift.expand(2, 4))
