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
from torch.nn import functional

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model, load_checkpoint_in_model
from accel.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel.machine.errors import CheckpointError, StateError
from accel.utils import align_module_device, offload_state_dict, set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from accel.weights import read_ahead
from accel.weights.offloaded_tensors import OffloadedWeight
from tests.accel.weights.models import Tied, inputs, net

HALF = {"0": "cpu", "1": "disk"}
OFFLOADS: list[Callable[[nn.Module, Path], nn.Module]] = [
    lambda model, folder: cpu_offload(model, "cpu", offload_buffers=True),
    lambda model, folder: disk_offload(model, folder, "cpu"),
    lambda model, folder: dispatch_model(model, HALF, offload_dir=folder, offload_buffers=True),
]
RULE = r"offloaded weight \[.*without their values.*save_model.*get_state_dict_offloaded_model"


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


def test_the_remedy_of_a_file_of_safetensors_saves_the_values(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), cpu_offload(net(), "cpu")
    rule = r"\(meta\): .*offloaded weights .*save_model\(model"
    with pytest.raises(CheckpointError, match=rule) as caught:
        accelerator.save(model.state_dict(), tmp_path / "lost", safe_serialization=True)
    assert "safe_serialization=False" not in str(caught.value)


def test_an_offloaded_buffer_is_not_saved_without_its_values() -> None:
    model = cpu_offload(nn.BatchNorm1d(4), "cpu", offload_buffers=True)
    with pytest.raises(StateError, match=RULE):
        torch.save(model.state_dict()["running_mean"], io.BytesIO())


def test_no_name_of_a_tied_weight_is_saved_without_its_values() -> None:
    model = cpu_offload(Tied(), "cpu")
    for name in ("embedding.weight", "head.weight"):
        with pytest.raises(StateError, match=RULE):
            pickle.dumps(model.state_dict()[name])


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
def test_a_state_dict_is_looked_at_and_loaded_again(offload: Any, tmp_path: Path) -> None:
    model = offload(net(), tmp_path / "off")
    state = model.state_dict()
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in net().state_dict().items()
    }
    assert not model.load_state_dict(state).missing_keys
    assert not model.load_state_dict(copy.deepcopy(state)).missing_keys
    assert torch.equal(model(inputs()), net()(inputs()))
    with pytest.raises(RuntimeError, match=RULE):
        net().load_state_dict(state)
    with pytest.raises(StateError, match=RULE):
        torch.ones(4, 4) @ state["1.linear.weight"]
    for use in (torch.Tensor.numpy, torch.Tensor.tolist, lambda value: value[0, 0].item()):
        with pytest.raises(StateError, match=RULE):
            use(state["1.linear.weight"])
    remove_hook_from_submodules(model)
    torch.save(model.state_dict(), tmp_path / "full.pt")


def test_a_weight_on_a_device_is_saved(tmp_path: Path) -> None:
    model = dispatch_model(net(), HALF, offload_dir=tmp_path)
    resident = {name: value for name, value in model.state_dict().items() if name[0] == "0"}
    torch.save(resident, tmp_path / "resident.pt")
    assert type(resident["0.scale"]) is torch.Tensor


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("move", [nn.Module.cpu, lambda m: m.cpu(), lambda m: m.to("cpu")])
def test_an_offloaded_model_is_not_moved(offload: Any, move: Any, tmp_path: Path) -> None:
    model = offload(net(), tmp_path)
    rule = r"You can't move a model .*remove_hook_from_submodules\(model\)"
    for module in (model, nn.Sequential(model), model[1].linear):
        with pytest.raises(StateError, match=rule):
            move(module)
    assert torch.equal(model(inputs()), net()(inputs()))
    remove_hook_from_submodules(model)
    assert move(model) is model


@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_weights_get_another_dtype(offload: Any, tmp_path: Path) -> None:
    model, expected = offload(net(), tmp_path), net().to(torch.float64)
    x = inputs().double()
    assert model.to(torch.float64, non_blocking=True) is model
    assert torch.equal(model(x), expected(x))


Use = Callable[[torch.Tensor, torch.Tensor], object]
UNUSED_RULE = (
    r"an offloaded weight \[.* is used while its module does not run.*preload_module_classes"
)


class Reader(nn.Module):
    """Uses the weight of a submodule without calling it."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.inner = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> object:
        return self.use(self.layer(x), self.inner.weight)


USES: list[Use] = [
    lambda x, w: x @ w.T,
    lambda x, w: x @ w.t(),
    lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    lambda x, w: torch.matmul(x, w.T.contiguous()),
    lambda x, w: functional.linear(x, w[:2]),
    lambda x, w: functional.linear(x, w.chunk(2)[1]),
    lambda x, w: functional.linear(x, torch.stack(list(w.unbind()))),
    lambda x, w: x @ w.data.T,
    lambda x, w: x @ w.half().float().T,
    lambda x, w: x @ w.clone().mT,
    lambda x, w: torch.einsum("bi,oi->bo", x, w[:, :4]),
    lambda x, w: x[:, :1] * w[0],
    lambda x, w: w.norm(),
    lambda x, w: torch.cat([w.view(-1), w.reshape(-1)]),
    lambda x, w: (w * 2)[:, :4] @ x.T,
    lambda x, w: w[0, 0].item(),
    lambda x, w: w.data.numpy(),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_view_is_not_computed_with(use: Use, context: type) -> None:
    model = cpu_offload(Reader(use), "cpu")
    with context(), pytest.raises(StateError, match=UNUSED_RULE):
        model(torch.ones(2, 4))
    with context():
        cpu_offload(Reader(use), "cpu", preload_module_classes=["Reader"])(torch.ones(2, 4))


def test_detached_views_are_not_computed_with() -> None:
    model = cpu_offload(Reader(lambda x, w: x @ w.detach()[:, :4].T), "cpu")
    with pytest.raises(StateError, match="an offloaded weight"):
        model(torch.ones(2, 4))


def test_parameters_are_not_gathered_in_a_vector() -> None:
    model = cpu_offload(nn.Linear(4, 4), "cpu")
    with pytest.raises(StateError, match=UNUSED_RULE):
        nn.utils.parameters_to_vector(model.parameters())


def test_shapes_and_new_tensors_need_no_values() -> None:
    weight = cpu_offload(nn.Linear(4, 3), "cpu").weight
    assert weight.T.shape == (4, 3)
    assert weight[:2].half().dtype == torch.float16
    assert [part.shape for part in weight.split(2)] == [(2, 4), (1, 4)]
    assert torch.zeros_like(weight, device="cpu").sum() == 0
    assert weight.new_ones(2, device="cpu").sum() == 2
    assert weight.requires_grad_(False) is weight
    for like in (torch.zeros_like(weight), weight.new_ones(3, 4)):
        assert like.add_(1).shape == (3, 4)
        with pytest.raises(StateError, match=UNUSED_RULE):
            torch.ones(2, 4) @ like.T


WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda w: w.mul_(2),
    lambda w: w.copy_(torch.ones(4, 4)),
    lambda w: w.__iadd__(torch.ones(4, 4)),
    lambda w: w.__setitem__(0, 1.0),
    lambda w: w[:2].zero_(),
    lambda w: w.T.fill_(1.0),
    lambda w: w.data.mul_(2),
    lambda w: w.detach().copy_(torch.ones(4, 4)),
    lambda w: w.data.__setitem__(0, 1.0),
    lambda w: nn.init.zeros_(w),
    lambda w: nn.init.kaiming_uniform_(w),
    lambda w: functional.relu(w, inplace=True),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: torch.add(torch.ones(4, 4), 1, out=w),
    lambda w: w.lerp_(torch.ones(4, 4), 0.5),
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
        with context(), pytest.raises(StateError, match=r"\[\d.* is written to .* would be lost"):
            write(weight)
        with context(), pytest.raises(StateError, match="would be lost"):
            write(model.state_dict()["weight"])
        assert torch.equal(model(torch.ones(2, 4)), before)


READS: list[Use] = [
    lambda x, w: x.add_(w[0]),
    lambda x, w: x.__imul__(w[0]),
    lambda x, w: x.addmm_(x, w),
    lambda x, w: x.fill_(w[0, 0]),
    lambda x, w: x.__setitem__(0, w[0]),
    lambda x, w: x.__setitem__(x > 0, w[0, 0]),
    lambda x, w: torch.mm(x, w, out=torch.zeros(2, 4)),
    lambda x, w: torch.mm(x, w.T, out=torch.zeros(2, 4)),
    lambda x, w: torch._foreach_add_([x], [w[:2]]),
    lambda x, w: x.mul_(0.9).add_(w[:2], alpha=0.1),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_weight_is_not_added_in_place(read: Use, context: type) -> None:
    weight = cpu_offload(nn.Linear(4, 4), "cpu").weight
    with context(), pytest.raises(StateError, match=UNUSED_RULE):
        read(torch.ones(2, 4), weight)


def test_another_offloaded_weight_in_its_place_is_refused() -> None:
    model = cpu_offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "cpu")
    x = torch.ones(2, 4)
    first, second = model[0], model[1]
    with pytest.raises(StateError, match=r"weight, bias of Linear: offloaded tensors were"):
        torch.func.functional_call(first, dict(second.named_parameters()), (x,))
    expected = model(x)
    first.weight, second.weight = second.weight, first.weight
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
            one(x)
    first.weight, second.weight = second.weight, first.weight
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_weight_is_guarded(
    copied: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = disk_offload(nn.Linear(4, 4), tmp_path, "cpu").requires_grad_(False)
    x, again = torch.ones(2, 4), copied(model)
    weight = again.get_parameter("weight")
    assert type(weight) is OffloadedWeight
    assert not weight.requires_grad
    with pytest.raises(StateError, match=UNUSED_RULE):
        x @ weight.T
    assert torch.equal(again(x), model(x))


def test_the_data_of_weights_is_not_saved_without_its_values() -> None:
    model = cpu_offload(nn.Linear(4, 4), "cpu")
    with pytest.raises(StateError, match=r"without their values.*save_model"):
        torch.save({name: one.data for name, one in model.named_parameters()}, io.BytesIO())


def test_a_frozen_weight_may_be_in_an_optimizer() -> None:
    model = nn.Sequential(
        cpu_offload(nn.Linear(4, 4), "cpu").requires_grad_(False), nn.Linear(4, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 2


class Scaled(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.add_(1)
        return x * self.scale


def test_offloaded_buffers_are_not_computed_with() -> None:
    model: Any = cpu_offload(Scaled(), "cpu", offload_buffers=True)
    x = torch.ones(2, 4)
    uses = [lambda: x * model.scale, lambda: x[:, :2] * model.scale[:2], lambda: x @ model.scale]
    for use in uses:
        with pytest.raises(StateError, match=r"an offloaded weight \[\d\] is used while"):
            use()
    with pytest.raises(StateError, match="without their values"):
        torch.save(model.state_dict(), io.BytesIO())
    copies: list[Any] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in (model, *copies):
        assert torch.equal(one(x), 4 * x)
        with pytest.raises(StateError, match=UNUSED_RULE):
            x * one.get_buffer("scale")
    assert torch.equal(model(x), 5 * x)
    assert torch.equal(copies[1](x), 5 * x)
    assert type(remove_hook_from_module(model).scale) is torch.Tensor
    assert torch.equal(model(x), 6 * x)


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


@WRITE_OFFLOADS
def test_changes_within_a_context_are_kept(offload: Offload, tmp_path: Path) -> None:
    model, expected = offload(net(), tmp_path), net()
    with align_module_device(model[0].linear):
        model[0].linear.weight.data.zero_()
        model[0].linear.bias = nn.Parameter(torch.ones(4))
    expected[0].linear.weight.data.zero_()
    expected[0].linear.bias.data.fill_(1)
    assert torch.equal(model(inputs()), expected(inputs()))


@WRITE_OFFLOADS
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


@WRITE_OFFLOADS
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
