"""Models without memory for their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel import init_empty_weights, init_on_device
from accel.machine.env import patch_environment
from tests.accel.weights.models import Block, Tied, on_meta

WEIGHTS = {"scale", "norm.weight", "norm.bias", "linear.weight", "linear.bias"}


def test_parameters_have_no_memory() -> None:
    with init_empty_weights():
        block, linear = Block(), nn.Linear(50_000, 50_000)
    assert on_meta(block) == WEIGHTS
    assert linear.weight.shape == (50_000, 50_000)
    assert block.scale.requires_grad
    assert on_meta(Block()) == set()


def test_buffers_stay_unless_they_are_included() -> None:
    with init_empty_weights(include_buffers=True):
        assert on_meta(Block()) > {*WEIGHTS, "shift", "norm.running_mean"}
        assert torch.ones(1).is_meta
    with patch_environment(accelerate_init_include_buffers="1"):
        with init_empty_weights():
            assert "shift" in on_meta(Block())
        with init_empty_weights(include_buffers=False):
            assert "shift" not in on_meta(Block())


def test_weights_stay_tied() -> None:
    with init_empty_weights():
        model = Tied()
    assert model.head.weight is model.embedding.weight


def test_any_device_will_do() -> None:
    for device in ("meta", torch.device("meta")):
        with init_on_device(device):
            assert on_meta(Block()) == WEIGHTS
        with init_on_device(device, include_buffers=True):
            assert "shift" in on_meta(Block())
    with init_on_device("cpu"):
        assert on_meta(Block()) == set()


def test_torch_is_as_before_after_an_error() -> None:
    register = nn.Module.register_parameter, nn.Module.register_buffer
    with pytest.raises(KeyError), init_empty_weights(include_buffers=True):
        raise KeyError
    assert register == (nn.Module.register_parameter, nn.Module.register_buffer)
