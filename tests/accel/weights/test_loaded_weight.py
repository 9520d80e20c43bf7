"""Whether a weight was changed while it was loaded, also where nothing counts the changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import disk_offload
from accel.hooks import LayerwiseCastingHook, add_hook_to_module
from accel.weights import ties
from accel.weights.ties import LoadedWeight, content_of
from tests.accel.weights.models import hook_of, inputs

Write = Callable[[nn.Linear], object]


def in_place(layer: nn.Linear) -> None:
    layer.weight.add_(1)


def to_data(layer: nn.Linear) -> None:
    layer.weight.data += 1


def other_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data + 1


def assigned(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight + 1)


WRITES = pytest.mark.parametrize("write", [in_place, to_data, other_data, assigned])


@WRITES
def test_what_is_written_between_the_callbacks_is_kept(write: Write, tmp_path: Path) -> None:
    """As peft does to merge adapters, which calls the hook itself."""
    model = disk_offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path, "cpu")
    before = model(inputs())
    layer, hook = model[1], hook_of(model[1])
    with torch.no_grad():
        expected = before + model[0](inputs()).sum(1, keepdim=True)
        hook.pre_forward(layer)
        write(layer)
        hook.post_forward(layer, torch.tensor([]))
        for _ in range(2):
            assert torch.allclose(model(inputs()), expected, atol=1e-6)


@WRITES
def test_changes_are_found(write: Write) -> None:
    layer = nn.Linear(2, 2)
    weights = {"weight": layer.weight.detach().clone()}
    loaded = LoadedWeight(layer.weight)
    assert not any(loaded.changed(layer.weight, weights, "weight", by) for by in (True, False))
    with torch.no_grad():
        write(layer)
    assert loaded.changed(layer.weight, weights, "weight", by_contents=True)
    untraced = write is to_data
    assert loaded.changed(layer.weight, weights, "weight", by_contents=False) is not untraced


def test_a_forward_pass_compares_no_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = disk_offload(nn.Sequential(nn.Linear(4, 4)), tmp_path, "cpu")
    compared: list[torch.Tensor] = []

    def spy(tensor: torch.Tensor) -> torch.Tensor:
        compared.append(tensor)
        return content_of(tensor)

    monkeypatch.setattr(ties, "content_of", spy)
    model(inputs())
    assert not compared
    hook_of(model[0]).pre_forward(model[0])
    hook_of(model[0]).post_forward(model[0], ())
    assert len(compared) == 4


def test_another_dtype_alone_is_no_change(tmp_path: Path) -> None:
    """Weights on disk would all come into memory."""
    model = disk_offload(nn.Sequential(nn.Linear(4, 4)), tmp_path, "cpu")
    weights = hook_of(model[0]).weights_map
    casting = LayerwiseCastingHook(torch.float32, torch.bfloat16, non_blocking=False)
    casting.init_hook = lambda module: module  # type: ignore[method-assign] # dtype of the disk
    add_hook_to_module(model[0], casting, append=True)
    assert model(inputs()).dtype == torch.bfloat16
    assert weights is not None
    assert weights["weight"].dtype == torch.float32
