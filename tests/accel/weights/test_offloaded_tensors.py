"""E4: writes to offloaded weights and computations with them are kept or refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model, load_checkpoint_in_model
from accel.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accel.machine.errors import StateError
from accel.utils import align_module_device, set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from accel.weights import read_ahead
from tests.accel.weights.models import Tied, inputs, net

HALF = {"0": "cpu", "1": "disk"}
OFFLOADS: list[Callable[[nn.Module, Path], nn.Module]] = [
    lambda model, folder: cpu_offload(model, "cpu", offload_buffers=True),
    lambda model, folder: disk_offload(model, folder, "cpu"),
    lambda model, folder: dispatch_model(model, HALF, offload_dir=folder, offload_buffers=True),
]
RULE = r"offloaded weight \[.* outside the forward pass of its module.*preload_module_classes"


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
def test_offloaded_weights_get_another_dtype(offload: Any, tmp_path: Path) -> None:
    model, expected = offload(net(), tmp_path), net().to(torch.float64)
    x = inputs().double()
    assert model.to(torch.float64, non_blocking=True) is model
    assert torch.equal(model(x), expected(x))


WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda w: w.mul_(2),
    lambda w: w.__iadd__(torch.ones(4, 4)),
    lambda w: w.__setitem__(0, 1.0),
    lambda w: w[:2].zero_(),
    lambda w: w.detach().copy_(torch.ones(4, 4)),
    lambda w: nn.init.zeros_(w),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: torch.add(torch.ones(4, 4), 1, out=w),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_write_to_a_weight_is_refused(
    write: Callable[[torch.Tensor], object], context: type, tmp_path: Path
) -> None:
    """It would be lost: outside the forward pass of its module a weight has no values."""
    for model in (cpu_offload(nn.Linear(4, 4), "cpu"), disk_offload(nn.Linear(4, 4), tmp_path)):
        weight = model.get_parameter("weight")
        before = model(torch.ones(2, 4))
        with context(), pytest.raises(StateError, match=RULE):
            write(weight)
        with context(), pytest.raises(StateError, match=RULE):
            write(model.state_dict()["weight"])
        assert torch.equal(model(torch.ones(2, 4)), before)


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


WRITE_OFFLOADS = pytest.mark.parametrize("offload", [cpu, disk, mapped])
CONTEXTS = pytest.mark.parametrize(
    "context", [torch.enable_grad, torch.no_grad, torch.inference_mode]
)


def files(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@WRITE_OFFLOADS
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


@WRITE_OFFLOADS
def test_changes_within_a_context_are_kept(offload: Offload, tmp_path: Path) -> None:
    model, expected = offload(net(), tmp_path), net()
    with align_module_device(model[0].linear):
        model[0].linear.weight.data.zero_()
        model[0].linear.bias = nn.Parameter(torch.ones(4))
    expected[0].linear.weight.data.zero_()
    expected[0].linear.bias.data.fill_(1)
    assert torch.equal(model(inputs()), expected(inputs()))


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


def test_a_checkpoint_is_never_written(tmp_path: Path) -> None:
    model = mapped(Counter(), tmp_path)
    model(inputs())
    assert all(not value for value in load_file(tmp_path / "model.safetensors").values())
