"""Weights that a forward-pre-hook of torch computes from others, which are offloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from accel import cpu_offload, disk_offload, dispatch_model
from accel.machine.errors import ConfigError, StateError
from tests.accel.weights.models import inputs

Wrap = Callable[[nn.Module], nn.Module]


def pruned(layer: nn.Module) -> nn.Module:
    wrapped: nn.Module = prune.l1_unstructured(layer, "weight", 0.5)
    return wrapped


def pruned_twice(layer: nn.Module) -> nn.Module:
    return pruned(pruned(layer))


WRAPS = pytest.mark.parametrize("wrap", [weight_norm, spectral_norm, pruned, pruned_twice])
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm")


@WRAPS
@pytest.mark.parametrize("buffers", [False, True])
def test_offloading_them_is_refused(wrap: Wrap, buffers: bool, tmp_path: Path) -> None:
    rule = r"0 has torch\.nn\.utils\..*before offloaded weights are loaded.*preload_module_classes"
    with pytest.raises(ConfigError, match=rule):
        cpu_offload(nn.Sequential(wrap(nn.Linear(4, 4))), "cpu", offload_buffers=buffers)
    with pytest.raises(ConfigError, match=rule):
        disk_offload(nn.Sequential(wrap(nn.Linear(4, 4))), tmp_path, offload_buffers=buffers)
    model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4)).eval()
    with pytest.raises(ConfigError, match=rule):
        dispatch_model(model, {"0": "disk", "1": "cpu"}, offload_dir=tmp_path)
    plain = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4))).eval()
    with torch.no_grad():
        expected = plain(inputs())
        model = dispatch_model(plain, {"0": "disk", "1": "cpu"}, offload_dir=tmp_path)
        assert torch.equal(model(inputs()), expected)


@WRAPS
def test_a_module_around_them_loads_them_first(wrap: Wrap, tmp_path: Path) -> None:
    class Around(nn.Sequential):
        pass

    torch.manual_seed(0)
    plain = nn.Sequential(Around(nn.Linear(4, 4))).eval()
    expected = nn.Sequential(Around(wrap(copy.deepcopy(plain[0][0])))).eval()
    wrap(plain[0][0])
    expected.load_state_dict(plain.state_dict())
    model = disk_offload(plain, tmp_path, "cpu", True, preload_module_classes=["Around"])
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(inputs()), expected(inputs()))


@WRAPS
def test_adding_them_afterwards_is_refused(wrap: Wrap) -> None:
    layer = cpu_offload(nn.Linear(4, 4), "cpu", offload_buffers=True)
    with pytest.raises(StateError, match=r"an offloaded weight|no hook has a value"):
        wrap(layer)(inputs())


def test_parametrizations_are_offloaded(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    assert torch.equal(model(inputs()), plain(inputs()))


@WRAPS
def test_a_refused_dispatch_leaves_the_model_as_it_was(wrap: Wrap, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4))).eval()
    tied = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4)), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    expected = model(inputs())
    with pytest.raises(ConfigError):
        cpu_offload(model, "cpu")
    with pytest.raises(ConfigError):
        disk_offload(tied, tmp_path / "disk", "cpu")
    with pytest.raises(ConfigError):
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "map")
    assert not any(hasattr(module, "_hf_hook") for module in [*model.modules(), *tied.modules()])
    assert tied[2].weight is tied[0].weight
    assert torch.equal(model(inputs()), expected)
