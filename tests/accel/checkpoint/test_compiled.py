"""R5: a state is loaded with and without the user's compilation of a submodule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel import Accelerator, load_checkpoint_in_model
from accel.state import AcceleratorState
from tests.helpers import run_distributed

NAMES = {"0.weight", "0.bias", "1.0.weight", "1.0.bias"}


def prepared(compiled: bool, plugin: Any = None) -> tuple[Accelerator, nn.Module, Any]:
    AcceleratorState._reset_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    if compiled:
        model[1] = torch.compile(model[1], backend="eager")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


def trained(folder: str, compiled: bool, plugin: Any = None) -> dict[str, torch.Tensor]:
    accelerator, model, optimizer = prepared(compiled, plugin)
    accelerator.backward(model(torch.ones(3, 4)).sum())
    optimizer.step()
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/export")
    wanted = accelerator.get_state_dict(model)
    assert wanted.keys() == NAMES
    accelerator, model, optimizer = prepared(not compiled, plugin)
    accelerator.load_state(f"{folder}/state")
    found = accelerator.get_state_dict(model)
    assert all(torch.equal(found[name], wanted[name]) for name in NAMES)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_names_are_those_without_the_compilation(compiled: bool, tmp_path: Path) -> None:
    trained(str(tmp_path), compiled)
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == NAMES
    _, model, _ = prepared(not compiled)
    load_checkpoint_in_model(model, tmp_path / "export", strict=True)


def sharded(folder: str) -> None:
    from accel import FullyShardedDataParallelPlugin

    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        trained(f"{folder}/{kind}", True, plugin)


def test_names_of_a_sharded_model(tmp_path: Path) -> None:
    run_distributed(sharded, 2, str(tmp_path))


def test_a_model_is_unwrapped_of_all_compilations() -> None:
    """E1: `unwrap_model(keep_torch_compile=False)`."""
    accelerator, model, _ = prepared(compiled=True)
    kept = accelerator.unwrap_model(model)
    assert "_orig_mod" in dict(kept[1].named_children())
    own = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert {name for name, _ in own.named_parameters()} == NAMES
