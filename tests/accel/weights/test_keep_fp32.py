"""Modules that stay in fp32 within a model of 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, dispatch_model, init_empty_weights, load_checkpoint_in_model

TOKENS = torch.tensor([[1, 2, 0]])
KEPT = ["embedding", "norm", "head"]


class Model(nn.Module):
    """Layers of each kind, the last of which takes an input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.middle = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(input=self.norm(self.middle(self.embedding(tokens))))
        return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Accelerator(cpu=True).save_model(Model().to(torch.bfloat16), tmp_path / "weights")
    return tmp_path / "weights"


@pytest.mark.parametrize(
    "device_map", [None, {"": "cpu"}, {"": "disk"}, {"embedding": "disk", "": "cpu"}]
)
def test_modules_kept_in_fp32_take_and_return_16_bits(
    device_map: dict[str, Any] | None, folder: Path, tmp_path: Path
) -> None:
    with init_empty_weights():
        model = Model()
    offload = tmp_path / "off"
    load_checkpoint_in_model(
        model, folder, device_map, offload, torch.bfloat16, keep_in_fp32_modules=KEPT
    )
    kept = {name for name, one in model.named_parameters() if one.dtype == torch.float32}
    assert {name.split(".")[0] for name in kept} == set(KEPT)
    assert model.middle.weight.dtype == torch.bfloat16  # on disk, too: as it will be loaded
    if device_map is not None:
        dispatch_model(model, device_map, offload_dir=offload, force_hooks=True)
    found = model(TOKENS)
    assert found.dtype == torch.bfloat16
    plain = Model()
    load_checkpoint_in_model(plain, folder)
    torch.testing.assert_close(found.float(), plain(TOKENS), atol=0.05, rtol=0.05)


def test_a_second_load_converts_once(folder: Path) -> None:
    model = Model()
    for _ in range(2):
        load_checkpoint_in_model(model, folder, dtype=torch.bfloat16, keep_in_fp32_modules=["head"])
    assert len(model.head._forward_hooks) == len(model.head._forward_pre_hooks) == 1
    assert not model.norm._forward_hooks


def test_in_fp32_nothing_is_converted(folder: Path) -> None:
    model = Model()
    load_checkpoint_in_model(model, folder, keep_in_fp32_modules=["head"])
    load_checkpoint_in_model(model, folder, dtype="float32", keep_in_fp32_modules=["head"])
    assert not model.head._forward_hooks
