"""Views of offloaded weights: nothing is computed from them outside the module's forward pass."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from accel import cpu_offload, disk_offload
from accel.hooks import remove_hook_from_module
from accel.machine.errors import StateError
from accel.weights.offloaded_tensors import OffloadedWeight

Use = Callable[[torch.Tensor, torch.Tensor], object]
RULE = r"an offloaded weight \[.* is used while its module does not run.*preload_module_classes"


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
    with context(), pytest.raises(StateError, match=RULE):
        model(torch.ones(2, 4))
    with context():
        cpu_offload(Reader(use), "cpu", preload_module_classes=["Reader"])(torch.ones(2, 4))


def test_detached_views_are_not_computed_with() -> None:
    model = cpu_offload(Reader(lambda x, w: x @ w.detach()[:, :4].T), "cpu")
    with pytest.raises(StateError, match="an offloaded weight"):
        model(torch.ones(2, 4))


def test_parameters_are_not_gathered_in_a_vector() -> None:
    model = cpu_offload(nn.Linear(4, 4), "cpu")
    with pytest.raises(StateError, match=RULE):
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
        with pytest.raises(StateError, match=RULE):
            torch.ones(2, 4) @ like.T


def test_shapes_are_computed_with_inputs_on_the_meta_device() -> None:
    weight = cpu_offload(nn.Linear(4, 3), "cpu").weight
    out = functional.softmax(torch.ones(2, 4, device="meta") @ weight.T, -1)
    assert out.shape == (2, 3)
    with pytest.raises(StateError, match=RULE):
        out.sum().item()
    with pytest.raises(StateError, match=RULE):
        torch.ones(5, 2) @ out


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
    with context(), pytest.raises(StateError, match=RULE):
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


def test_tied_offloaded_weights_may_be_tied_again() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    x = torch.tensor([1, 2])
    expected = model(x)
    model = cpu_offload(model, "cpu")
    model[1].weight = model[0].weight
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)


def test_what_is_added_after_a_dispatch_stays() -> None:
    layer = cpu_offload(nn.Linear(4, 4), "cpu", offload_buffers=True)
    layer.register_buffer("mask", torch.ones(4))
    layer.register_parameter("gate", nn.Parameter(torch.ones(4)))
    layer(torch.ones(2, 4))
    assert layer.get_buffer("mask").sum() == 4
    assert layer.get_parameter("gate").sum() == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_weight_is_guarded(
    copied: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = disk_offload(nn.Linear(4, 4), tmp_path, "cpu").requires_grad_(False)
    x, again = torch.ones(2, 4), copied(model)
    weight = again.get_parameter("weight")
    assert type(weight) is OffloadedWeight
    assert not weight.requires_grad
    with pytest.raises(StateError, match=RULE):
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


def test_a_parameter_made_of_a_view_is_placed() -> None:
    """Its class is that of the view; a hook that has a value for it makes it a plain one."""
    layer = nn.Linear(4, 4)
    model = cpu_offload(copy.deepcopy(layer), "cpu")
    model.weight = nn.Parameter(model.weight.data)
    assert torch.equal(model(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    with pytest.raises(StateError, match=RULE):
        torch.ones(2, 4) @ model.weight.T


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
        with pytest.raises(StateError, match=RULE):
            x * one.get_buffer("scale")
    assert torch.equal(model(x), 5 * x)
    assert torch.equal(copies[1](x), 5 * x)
    assert type(remove_hook_from_module(model).scale) is torch.Tensor
    assert torch.equal(model(x), 6 * x)
