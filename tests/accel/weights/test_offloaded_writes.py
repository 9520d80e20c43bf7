"""Values that are written to offloaded tensors are there in the next forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model
from accel.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from accel.machine.errors import StateError
from accel.utils import align_module_device, offload_state_dict, set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from accel.weights import read_ahead
from tests.accel.weights.models import Tied, inputs, net

Offload = Callable[[nn.Module, Path], nn.Module]


class Counter(nn.Module):
    """Counts its calls in buffers: one is changed in place, one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        return x + self.calls + self.replaced


def cpu(model: nn.Module, _: Path) -> nn.Module:
    return cpu_offload(model, "cpu", offload_buffers=True)


def disk(model: nn.Module, folder: Path) -> nn.Module:
    return disk_offload(model, folder, "cpu", offload_buffers=True)


def mapped(model: nn.Module, folder: Path) -> nn.Module:
    """Offload a model to a checkpoint of safetensors."""
    file = folder / "model.safetensors"
    state = model.state_dict()
    save_file(state, file)
    index = {name: {"safetensors_file": str(file), "weight_name": name} for name in state}
    where = {"": "disk"}
    return dispatch_model(model, where, "cpu", offload_index=index, offload_buffers=True)


OFFLOADS = pytest.mark.parametrize("offload", [cpu, disk, mapped])
CONTEXTS = pytest.mark.parametrize(
    "context", [torch.enable_grad, torch.no_grad, torch.inference_mode]
)


def files(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@OFFLOADS
@CONTEXTS
def test_statistics_of_training_are_kept(offload: Offload, context: type, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counter()).requires_grad_(False)
    model = offload(copy.deepcopy(plain), tmp_path)
    before = files(tmp_path)
    with context():
        for _ in range(3):
            assert torch.equal(model(inputs()), plain(inputs()))
        assert torch.equal(model.eval()(inputs()), plain.eval()(inputs()))
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert files(tmp_path) == before
    copied = copy.deepcopy(model)
    remove_hook_from_submodules(model)
    for one in (model, copied):
        assert torch.equal(one(inputs()), plain(inputs()))
        plain[2].calls -= 1
        plain[2].replaced -= 1


@OFFLOADS
def test_a_tensor_may_be_set(offload: Offload, tmp_path: Path) -> None:
    model = offload(net(), tmp_path)
    expected = net()
    for name, value in (
        ("1.linear.weight", torch.ones(4, 4)),
        ("0.norm.running_mean", torch.ones(4)),
    ):
        set_module_tensor_to_device(expected, name, "cpu", value=value)
        set_module_tensor_to_device(model, name, "cpu", value=value)
    assert model[1].linear.weight.is_meta
    for _ in range(2):
        assert torch.equal(model(inputs()), expected(inputs()))
    set_module_tensor_to_device(model[1].linear, "bias", "cpu", value=torch.ones(4).double())
    expected[1].linear.bias.data.fill_(1)
    assert torch.equal(model(inputs()), expected(inputs()))


def test_a_tensor_is_set_through_the_module_that_offloads_it() -> None:
    model = cpu_offload(net(), "cpu", offload_buffers=True, preload_module_classes=["Block"])
    for child, name, shape in (("linear", "weight", (4, 4)), ("norm", "running_mean", (4,))):
        part, value = model[0].get_submodule(child), torch.ones(shape)
        with pytest.raises(StateError, match="Pass the whole model and the full name"):
            set_module_tensor_to_device(part, name, "cpu", value=value)
        set_module_tensor_to_device(model, f"0.{child}.{name}", "cpu", value=value)
    expected = net()
    expected[0].linear.weight.data.fill_(1)
    expected[0].norm.running_mean.fill_(1)
    assert torch.equal(model(inputs()), expected(inputs()))


def test_a_hook_that_was_initialized_again_gives_its_values_back() -> None:
    model = net().to("meta")
    model[0].shift = model[1].shift = torch.zeros(4)
    cpu_offload(model, "cpu", offload_buffers=True, state_dict=net().state_dict())
    for _ in range(2):  # it is initialized again
        add_hook_to_module(model[0].norm, ModelHook(), append=True)
    with pytest.raises(StateError, match="is used while its module does not run"):
        model[0].norm.running_mean + 1
    expected = model(inputs())
    remove_hook_from_submodules(model)
    assert torch.allclose(model(inputs()), expected)


@OFFLOADS
def test_changes_within_a_context_are_kept(offload: Offload, tmp_path: Path) -> None:
    model, expected = offload(net(), tmp_path), net()
    with align_module_device(model[0].linear):
        model[0].linear.weight.data.zero_()
        model[0].linear.bias = nn.Parameter(torch.ones(4))
    expected[0].linear.weight.data.zero_()
    expected[0].linear.bias.data.fill_(1)
    assert torch.equal(model(inputs()), expected(inputs()))


@OFFLOADS
def test_a_save_within_a_context_has_its_changes(offload: Offload, tmp_path: Path) -> None:
    model = offload(net(), tmp_path)
    with align_module_device(model[0].linear), torch.no_grad():
        model[0].linear.weight.fill_(7.0)
        state = get_state_dict_offloaded_model(model)
        Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for found in (state, saved, get_state_dict_offloaded_model(model)):
        assert torch.equal(found["0.linear.weight"], torch.full((4, 4), 7.0))
        assert torch.equal(found["0.linear.bias"], net()[0].linear.bias)
        assert found["0.linear.bias"].device.type == "cpu"


def test_what_was_read_ahead_is_not_used_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 1)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    model = disk_offload(nn.Sequential(*layers), tmp_path, "cpu")
    model[0](inputs())  # the weight of the next one is read ahead
    set_module_tensor_to_device(model, "1.weight", "cpu", value=torch.eye(4))
    assert torch.equal(model[1](inputs()), inputs())
    model[0](inputs())
    hook = model[1]._hf_hook
    hook.weights_map = {"weight": torch.zeros(4, 4)}
    assert torch.equal(model[1](inputs()), torch.zeros(2, 4))


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path, "cpu")
    model[0].linear.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
        model(inputs())
    model = disk_offload(net(), tmp_path / "other", "cpu")
    with pytest.raises(StateError, match="are replaced by functional_call"):
        functional_call(model, {"1.linear.bias": torch.ones(4)}, inputs())
    tied = disk_offload(Tied(), tmp_path / "tied", "cpu")
    with pytest.raises(StateError, match="'weight' is tied to others and was changed"):
        set_module_tensor_to_device(tied, "head.weight", "cpu", value=torch.ones(6, 4))
    counter = Counter()
    weights = MappingProxyType({name: value.double() for name, value in counter.named_buffers()})
    hook = AlignDevicesHook("cpu", offload=True, offload_buffers=True, weights_map=weights)
    add_hook_to_module(counter, hook)
    with pytest.raises(StateError, match="mappingproxy, which it is read from, keeps no other"):
        counter(inputs())


def test_a_sequence_of_hooks_keeps_changes(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, Counter().state_dict())
    model = disk(Counter(), tmp_path)
    add_hook_to_module(model, ModelHook(), append=True)
    set_module_tensor_to_device(model, "calls", "cpu", value=torch.tensor(5.0))
    for expected in (7, 9):
        assert torch.allclose(model(inputs()), inputs() + expected)


def test_a_checkpoint_is_never_written(tmp_path: Path) -> None:
    model = mapped(Counter(), tmp_path)
    model(inputs())
    assert all(not value for value in load_file(tmp_path / "model.safetensors").values())


class Doubles(nn.Module):
    """Doubles its parameter at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return x * self.weight


@OFFLOADS
def test_what_is_kept_in_inference_mode_computes_gradients_later(
    offload: Offload, tmp_path: Path
) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(4), Counter(), Doubles())
    model = offload(copy.deepcopy(plain), tmp_path)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(inputs()), plain(inputs()))
    for one in (model, plain):
        one.requires_grad_(True).requires_grad_(False)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    for one, given in ((model, x), (plain, y)):
        one(given).square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)
    state = get_state_dict_offloaded_model(model)
    assert not any(value.is_inference() for value in state.values())


class Writes(nn.Module):
    """Writes to its parameter in a way that torch does not count."""

    def __init__(self, through: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.through(self.weight)
        view *= 2
        return x * self.weight


@pytest.mark.parametrize("through", [lambda one: one.data, lambda one: one.detach().numpy()])
def test_writes_that_torch_does_not_count_are_lost_on_disk_alone(
    through: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    """As README says: to find them would compare all weights with the files at each pass."""
    in_memory, on_disk = cpu(Writes(through), tmp_path), disk(Writes(through), tmp_path)
    for doubled in (2, 4):
        assert torch.equal(in_memory(inputs()), inputs() * doubled)
        assert torch.equal(on_disk(inputs()), inputs() * 2)
