"""Hooks around the forward pass of a module (E4)."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Recording(ModelHook):
    """Writes down what is called, and adds to inputs and outputs."""

    calls: list[str] = []  # noqa: RUF012 (shared by all, on purpose)

    def __init__(self, name: str, add: float = 0.0) -> None:
        self.name = name
        self.add = add

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append(f"init {self.name}")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"pre {self.name}")
        return tuple(arg + self.add for arg in args), {k: v + self.add for k, v in kwargs.items()}

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls.append(f"post {self.name}")
        return output * 2

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append(f"detach {self.name}")
        return module


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
        return self.weight * (x + y)


@pytest.fixture(autouse=True)
def calls() -> list[str]:
    Recording.calls = []
    return Recording.calls


def run(module: nn.Module) -> float:
    return float(module(torch.tensor(1.0), y=torch.tensor(2.0)).detach())


def test_a_hook_that_does_nothing() -> None:
    module, hook = Sum(), ModelHook()
    assert add_hook_to_module(module, hook) is module
    assert run(module) == 3.0
    assert hook.init_hook(module) is hook.detach_hook(module) is module
    assert hook.pre_forward(module, 1, a=2) == ((1,), {"a": 2})
    assert hook.post_forward(module, 5) == 5


def test_a_hook_changes_inputs_and_outputs(calls: list[str]) -> None:
    module = Sum()
    add_hook_to_module(module, Recording("a", add=1.0))
    assert run(module) == 10.0
    remove_hook_from_module(module)
    assert run(module) == 3.0
    assert calls == ["init a", "pre a", "post a", "detach a"]


def test_several_hooks_run_in_their_order(calls: list[str]) -> None:
    module = Sum()
    hook = SequentialHook(Recording("a", 1.0), Recording("b"))
    add_hook_to_module(module, hook)
    assert run(module) == 20.0
    remove_hook_from_module(module)
    assert calls == [
        f"{what} {name}" for what in ("init", "pre", "post", "detach") for name in "ab"
    ]


def test_a_hook_is_replaced_or_appended_to(calls: list[str]) -> None:
    module = Sum()
    for name, append in (("a", False), ("b", True), ("c", True)):
        add_hook_to_module(module, Recording(name), append=append)
    assert [hook.name for hook in module._hf_hook.hooks] == ["a", "b", "c"]
    assert run(module) == 24.0
    last = Recording("d")
    add_hook_to_module(module, last)
    assert module._hf_hook is last
    assert run(module) == 6.0


def test_forward_is_restored_exactly() -> None:
    module = Sum()
    before = dict(vars(module))
    add_hook_to_module(module, Recording("a"))
    add_hook_to_module(module, Recording("b"), append=True)
    assert inspect.signature(module.forward) == inspect.signature(Sum().forward)
    assert remove_hook_from_module(module) is module
    assert vars(module) == before
    assert remove_hook_from_module(module) is module


def test_a_forward_pass_may_compute_no_gradients() -> None:
    module = Sum()
    quiet = Recording("a")
    quiet.no_grad = True
    add_hook_to_module(module, quiet)
    assert not module(torch.ones(1), y=torch.ones(1)).requires_grad
    add_hook_to_module(module, Recording("b"), append=True)
    assert not module(torch.ones(1), y=torch.ones(1)).requires_grad
    remove_hook_from_module(module)
    assert module(torch.ones(1), y=torch.ones(1)).requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_runs_its_own_forward(copied: Any) -> None:
    module = Sum()
    add_hook_to_module(module, Recording("a"))
    other = copied(module)
    with torch.no_grad():
        other.weight.fill_(10.0)
    assert (run(module), run(other)) == (6.0, 60.0)
    remove_hook_from_module(other)
    assert (run(module), run(other)) == (6.0, 30.0)


def test_hooks_of_submodules_are_removed() -> None:
    for remove in (
        remove_hook_from_submodules,
        lambda model: remove_hook_from_module(model, recurse=True),
    ):
        model = nn.ModuleDict({"a": nn.ModuleDict({"b": Sum()}), "c": Sum()})
        for module in model.modules():
            add_hook_to_module(module, ModelHook())
        remove_hook_from_module(model)
        assert [hasattr(m, "_hf_hook") for m in model.modules()] == [False, True, True, True]
        remove(model)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_state_dict_does_not_show_hooks() -> None:
    module = Sum()
    add_hook_to_module(module, Recording("a"))
    assert list(module.state_dict()) == ["weight"]
    assert list(module.modules()) == [module]
