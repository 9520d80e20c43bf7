"""E1: parameters and buffers are listed, placed, tied and created on a device."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel import init_empty_weights, init_on_device
from accel.machine.env import patch_environment
from accel.machine.errors import ConfigError
from accel.utils import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    id_tensor_storage,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel.weights import tensors
from tests.accel.weights.models import Block, Tied, net, on_meta


def names(module: nn.Module, **options: bool) -> list[str]:
    return [name for name, _ in named_module_tensors(module, **options)]


def test_tensors_are_listed() -> None:
    block = Block()
    assert names(block) == ["scale", "shift"]
    assert names(block, include_buffers=False) == ["scale"]
    assert names(block, remove_non_persistent=True) == ["scale"]
    model = net()
    assert names(model, recurse=True)[:2] == ["0.scale", "0.norm.weight"]
    assert "0.shift" in names(model, recurse=True)
    persistent = names(model, recurse=True, remove_non_persistent=True)
    assert sorted(persistent) == sorted(model.state_dict())


# -- placing -------------------------------------------------------------------------------


def test_a_tensor_is_placed() -> None:
    model = net()
    set_module_tensor_to_device(model, "0.linear.weight", "meta")
    assert model[0].linear.weight.is_meta
    assert isinstance(model[0].linear.weight, nn.Parameter)
    kept = model[0].linear.bias
    set_module_tensor_to_device(model, "0.linear.bias", "cpu")
    assert model[0].linear.bias is kept


def test_a_value_is_taken_without_a_copy() -> None:
    model, value = net(), torch.ones(4)
    set_module_tensor_to_device(model, "0.scale", "cpu", value=value)
    assert model[0].scale.data_ptr() == value.data_ptr()
    assert model[0].scale.requires_grad
    set_module_tensor_to_device(model, "0.norm.running_mean", "cpu", value=value)
    assert not isinstance(model[0].norm.running_mean, nn.Parameter)


def test_the_dtype_is_that_of_the_module_or_the_one_given() -> None:
    model, value = net(), torch.ones(4, dtype=torch.float64)
    set_module_tensor_to_device(model, "0.scale", "cpu", value=value)
    assert model[0].scale.dtype == torch.float32
    for dtype in (torch.float16, "float16"):
        set_module_tensor_to_device(model, "0.scale", "cpu", value=value, dtype=dtype)
        assert model[0].scale.dtype == torch.float16
    count = torch.tensor(3)
    set_module_tensor_to_device(
        model, "0.norm.num_batches_tracked", "cpu", value=count, dtype=torch.float16
    )
    assert model[0].norm.num_batches_tracked.dtype == torch.int64
    with pytest.raises(ConfigError, match="flaot"):
        set_module_tensor_to_device(model, "0.scale", "cpu", value=value, dtype="flaot")


def test_a_parameter_keeps_its_class_and_attributes() -> None:
    class Marked(nn.Parameter):
        """A parameter of another library."""

    model = net()
    model[0].scale = Marked(torch.ones(4), requires_grad=False)
    model[0].scale.tag = "mine"
    for device, value in (("meta", None), ("cpu", torch.zeros(4))):
        set_module_tensor_to_device(model, "0.scale", device, value=value)
        assert type(model[0].scale) is Marked
        assert model[0].scale.tag == "mine"
        assert not model[0].scale.requires_grad


def test_scales_of_8_bit_weights_are_kept() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    value = torch.ones(2, 2, dtype=torch.int8)
    set_module_tensor_to_device(
        layer, "weight", "cpu", value, fp16_statistics=torch.full((2,), 0.5)
    )
    assert layer.weight.SCB.tolist() == [0.5, 0.5]


def test_copies_of_tied_weights_are_reused() -> None:
    value = torch.ones(4)
    copies: tensors.TiedParams = {value.data_ptr(): {}}
    model = net()
    for name in ("0.scale", "1.scale"):
        set_module_tensor_to_device(model, name, "cpu", value, tied_params_map=copies)
    assert model[0].scale is model[1].scale
    assert copies[value.data_ptr()] == {torch.device("cpu"): model[0].scale}


class Slow(torch.Tensor):
    """A tensor that says how it is moved."""

    moves: list[bool]

    def to(self, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        Slow.moves.append(bool(args[2]))
        return self.as_subclass(torch.Tensor)


def test_a_copy_may_overlap_with_computation() -> None:
    for non_blocking in (True, False):
        Slow.moves = []
        value = torch.ones(4).as_subclass(Slow)
        set_module_tensor_to_device(net(), "0.scale", "cpu", value, non_blocking=non_blocking)
        assert Slow.moves == [non_blocking]


def test_cached_memory_is_given_back_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(tensors, "clear_device_cache", lambda: cleared.append(True))
    monkeypatch.setattr(tensors, "_leaves", lambda device, target: target.type == "meta")
    set_module_tensor_to_device(net(), "0.scale", "meta", clear_cache=False)
    assert cleared == []
    set_module_tensor_to_device(net(), "0.scale", "meta")
    assert cleared == [True]


def test_what_does_not_fit_is_refused() -> None:
    model = net()
    for name, value, message in (
        ("0.wight", None, "does not have a parameter or a buffer named wight"),
        ("0.linear.weight", torch.ones(3, 4), "this looks incorrect"),
    ):
        with pytest.raises(ConfigError, match=message):
            set_module_tensor_to_device(model, name, "cpu", value=value)
    with pytest.raises(ConfigError, match="we need a `value`"):
        set_module_tensor_to_device(net().to("meta"), "0.scale", "cpu")
    with pytest.raises(ConfigError, match="registered as None"):
        set_module_tensor_to_device(nn.Linear(1, 1, bias=False), "bias", "cpu")


# -- tied weights --------------------------------------------------------------------------


def test_tied_parameters_are_found() -> None:
    tied = [["embedding.weight", "head.weight"]]
    assert find_tied_parameters(Tied()) == tied
    with init_empty_weights():
        assert find_tied_parameters(Tied()) == tied
    assert find_tied_parameters(net()) == []


def test_parameters_are_tied_again() -> None:
    model = Tied()
    groups = find_tied_parameters(model)
    model.embedding.weight = nn.Parameter(torch.empty(6, 4, device="meta"))
    retie_parameters(model, groups)
    assert model.embedding.weight is model.head.weight
    assert not model.head.weight.is_meta


def test_tied_parameters_belong_on_one_device(caplog: pytest.LogCaptureFixture) -> None:
    groups = [["a.weight", "b.weight"]]
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(groups, {"": 0})
        assert caplog.text == ""
        check_tied_parameters_on_same_device(groups, {"": 0, "b": 1})
    assert "{'a.weight': 0, 'b.weight': 1}" in caplog.text
    with pytest.raises(ConfigError, match=r"b\.weight"):
        check_tied_parameters_on_same_device(groups, {"a": 0})


def test_a_configuration_says_whether_embeddings_are_tied() -> None:
    model = Tied()
    assert not check_tied_parameters_in_config(model)
    model.config = SimpleNamespace(tie_word_embeddings=True)
    model.get_output_embeddings = lambda: model.head
    assert check_tied_parameters_in_config(model)


def test_memory_has_an_identity() -> None:
    weight = torch.ones(4)
    assert id_tensor_storage(weight) == id_tensor_storage(weight[:2])
    assert id_tensor_storage(weight) != id_tensor_storage(torch.ones(4))
    ghosts = [torch.ones(4, device="meta") for _ in range(2)]
    assert id_tensor_storage(ghosts[0]) != id_tensor_storage(ghosts[1])


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


def test_any_device_will_do() -> None:
    for device in ("meta", torch.device("meta")):
        with init_on_device(device):
            assert on_meta(Block()) == WEIGHTS
        with init_on_device(device, include_buffers=True):
            assert "shift" in on_meta(Block())
    with init_on_device("cpu"):
        assert on_meta(Block()) == set()
