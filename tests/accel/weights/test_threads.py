"""Several threads run one offloaded model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel import cpu_offload, disk_offload, dispatch_model
from accel.hooks import ModelHook, SequentialHook, add_hook_to_module
from accel.machine.errors import StateError
from accel.utils import align_module_device
from accel.weights import read_ahead
from tests.accel.weights.models import hook_of, on_meta

Offload = Callable[[nn.Module, Path], nn.Module]
OFFLOADS: list[Offload] = [
    lambda model, folder: disk_offload(model, folder, "cpu"),
    lambda model, folder: cpu_offload(model, "cpu"),
    lambda model, folder: dispatch_model(model, {"0": "cpu", "": "disk"}, offload_dir=folder),
]


def layers() -> nn.Sequential:
    """Return layers large enough to be read ahead."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(600, 600) for _ in range(6)]).requires_grad_(False)


class Waiting(nn.Module):
    """Waits within its forward pass, for others to begin theirs."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.barrier = threading.Barrier(parties, timeout=30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.barrier.wait()
        out = x * self.weight
        if x[0] == 0:  # the first to leave
            self.barrier.wait()
            return out
        self.barrier.wait()
        return out + self.weight


@pytest.mark.parametrize("offload", OFFLOADS)
def test_threads_compute_what_one_does(offload: Offload, tmp_path: Path) -> None:
    plain = layers()
    model = offload(copy.deepcopy(plain), tmp_path)
    x = torch.rand(4, 600)
    expected = plain(x)

    def run(_: int) -> list[torch.Tensor]:
        return [model(x) for _ in range(20)]

    with ThreadPoolExecutor(3) as threads:
        for results in threads.map(run, range(3)):
            assert all(torch.equal(result, expected) for result in results)
    assert all(parameter.is_meta for parameter in model[1:].parameters())


def test_weights_stay_until_the_last_thread_has_used_them() -> None:
    model = cpu_offload(Waiting(2), "cpu")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(model, (torch.zeros(3), torch.ones(3)))
    assert torch.equal(first, torch.zeros(3))
    assert torch.equal(second, torch.full((3,), 2.0))
    assert on_meta(model) == {"weight"}


def test_a_thread_may_wait_for_another_that_recomputes(tmp_path: Path) -> None:
    plain = layers()
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")

    class Gradient(nn.Module):
        """Computes a gradient within its forward pass, in another thread as GPUs do."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            out = checkpoint(self.inner, x, use_reentrant=False).sum()
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(torch.autograd.grad, out, x).result(timeout=60)[0]

    x = torch.rand(4, 600)
    outer = add_hook_to_module(Gradient(model), hook_of(model))
    assert torch.equal(outer(x), Gradient(plain)(x))


def test_a_module_may_run_within_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            inner = self(x, 0) if depth else x
            out: torch.Tensor = inner * self.weight
            return out

    model = cpu_offload(Twice().requires_grad_(False), "cpu")
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 4.0))
    with align_module_device(model):
        assert torch.equal(model(torch.ones(3)), torch.full((3,), 4.0))
        assert not on_meta(model)
    assert on_meta(model) == {"weight"}


def test_a_failed_forward_pass_leaves_nothing_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 1)
    model = disk_offload(layers(), tmp_path, "cpu")
    expected = layers()(torch.ones(1, 600))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))
    assert all(parameter.is_meta for parameter in model.parameters())

    class Refusing(ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> object:
            raise StateError("refused")

    add_hook_to_module(model[1], SequentialHook(hook_of(model[1]), Refusing()))
    with pytest.raises(StateError, match="refused"):
        model(torch.ones(1, 600))
    assert all(parameter.is_meta for parameter in model.parameters())
    add_hook_to_module(model[1], model[1]._hf_hook.hooks[0])
    assert torch.equal(model(torch.ones(1, 600)), expected)
