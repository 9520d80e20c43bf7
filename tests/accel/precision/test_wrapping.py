"""Taking modules out of what lies around them (E1)."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch

from accel.precision import wrapping
from accel.precision.wrapping import (
    WrappedForward,
    get_module_children_bottom_up,
    is_compiled_module,
    is_peft_model,
    unwrap_forward,
    wrap_forward,
)
from accel.utils import extract_model_from_parallel


def test_containers_deeper_in_a_module_are_removed_on_demand() -> None:
    inner = torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.DataParallel(inner)))
    assert extract_model_from_parallel(model)[0][0] is not inner
    assert extract_model_from_parallel(model, recursive=True)[0][0] is inner


def test_a_forward_is_wrapped_once_and_keeps_its_signature() -> None:
    model = torch.nn.Linear(1, 1)
    for _ in range(2):
        wrap_forward(model, lambda: torch.autocast("cpu", torch.bfloat16))
    assert not isinstance(model.forward.forward, WrappedForward)
    assert list(inspect.signature(model.forward).parameters) == ["input"]
    unwrap_forward(model)
    unwrap_forward(model)
    assert "forward" not in model.__dict__


def test_a_model_is_taken_out_of_its_containers() -> None:
    inner = torch.nn.Linear(1, 1)
    wrap_forward(inner, lambda: torch.autocast("cpu", torch.bfloat16))
    outside = torch.nn.DataParallel(torch.nn.DataParallel(inner))
    assert extract_model_from_parallel(inner) is inner
    assert extract_model_from_parallel(outside) is inner
    assert isinstance(inner.forward, WrappedForward)
    assert extract_model_from_parallel(outside, keep_fp32_wrapper=False) is inner
    assert "forward" not in inner.__dict__


def test_a_compiled_module_is_recognized() -> None:
    inner = torch.nn.Linear(1, 1)
    assert is_compiled_module(torch.compile(inner)) is True
    for other in (inner, torch.nn.DataParallel(inner), torch.compile(lambda: None), None):
        assert is_compiled_module(other) is False


def test_modules_come_after_those_inside_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Tanh()))
    found = get_module_children_bottom_up(model)
    named = get_module_children_bottom_up(model, return_fqns=True)
    assert [module for _, module in named] == found
    assert sorted(name for name, _ in named) == ["", "0", "1", "1.0"]
    places = {name: index for index, (name, _) in enumerate(named)}
    assert places["1.0"] < places["1"] < places[""] == len(found) - 1
    assert places["0"] < places[""]


def test_a_model_of_peft_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    class PeftModel(torch.nn.Linear):
        """As in peft, as far as it is asked for."""

    assert not is_peft_model(torch.nn.Linear(1, 1))
    peft = types.ModuleType("peft")
    peft.PeftModel = peft.PeftMixedModel = PeftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", peft)
    monkeypatch.setattr(wrapping, "is_available", lambda name: name == "peft")
    assert is_peft_model(torch.nn.DataParallel(PeftModel(1, 1)))
    assert not is_peft_model(torch.nn.Linear(1, 1))
