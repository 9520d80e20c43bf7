"""The objects of a run that a checkpoint is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel.checkpoint.contents import hooked, require_path
from accel.machine.errors import CheckpointError
from tests.accel.checkpoint.parts import build
from tests.accel.checkpoint.test_session import names


def test_a_hook_that_takes_out_one_of_two_models(tmp_path: Path) -> None:
    run = build()
    second = run.accelerator.prepare(nn.Linear(2, 2))
    run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop(0))
    run.accelerator.save_state(tmp_path)
    assert "model_1.safetensors" in names(tmp_path)
    run.accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(0))
    bias = second.bias.detach().clone()
    nn.init.zeros_(second.bias)
    run.accelerator.load_state(tmp_path)
    assert torch.equal(second.bias, bias)


def test_entries_that_a_hook_left_keep_their_index() -> None:
    every = [object(), object(), object()]
    assert hooked(every[1:], every, "save_state") == [(1, every[1]), (2, every[2])]
    replaced = ["a", "b", "c"]
    assert hooked(replaced, every, "save_state") == [(0, "a"), (1, "b"), (2, "c")]
    with pytest.raises(CheckpointError, match="a pre-hook of save_state added to the list"):
        hooked([*every, object()], every, "save_state")


def test_a_checkpoint_needs_a_directory() -> None:
    assert require_path(Path("x")) == Path("x")
    with pytest.raises(CheckpointError, match="Name a directory"):
        require_path(None)
