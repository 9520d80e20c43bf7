"""Sharded weights are merged into one file, and no code of theirs runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from accel import Accelerator, PartialState
from accel.machine.errors import CheckpointError
from accel.utils import merge_fsdp_weights
from tests.helpers import run_distributed


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(5, 3, generator=generator),
        "layer.bias": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(4),
    }


def save_sharded(folder: str, prefix: str) -> None:
    """Write weights in shards, as FSDP's sharded state dicts are written."""
    state = PartialState(cpu=True)
    mesh = DeviceMesh("cpu", list(range(state.num_processes)))
    shards = {
        name: distribute_tensor(value, mesh, [Shard(0)]) if value.dim() else value
        for name, value in weights().items()
    }
    saved: dict[str, Any] = {prefix: shards} if prefix else shards
    dcp.save(saved, checkpoint_id=folder)
    state.destroy_process_group()


@pytest.mark.parametrize("prefix", ["model", ""])
def test_shards_of_two_processes_are_merged(tmp_path: Path, prefix: str) -> None:
    folder = tmp_path / "pytorch_model_fsdp_0"
    run_distributed(save_sharded, 2, str(folder), prefix)
    assert len(list(folder.glob("*.distcp"))) == 2
    merge_fsdp_weights(folder, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == weights().keys()
    assert all(torch.equal(merged[name], value) for name, value in weights().items())
    merge_fsdp_weights(str(folder), str(tmp_path), False, True)
    merged = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(merged[name], value) for name, value in weights().items())
    assert not folder.exists()


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/pwned-by-a-test",)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError, match="system describes no tensor"):
        merge_fsdp_weights(tmp_path, tmp_path / "merged")
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="it is no description of tensors"):
        merge_fsdp_weights(tmp_path, tmp_path / "merged")


def test_values_that_would_be_unpickled_are_refused(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(2), "note": "text"}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="note is no tensor, and would be unpickled"):
        merge_fsdp_weights(tmp_path, tmp_path / "merged")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        merge_fsdp_weights(tmp_path / "none", tmp_path)
    with pytest.raises(CheckpointError, match=r"it holds no model\.safetensors"):
        merge_fsdp_weights(tmp_path, tmp_path)


def test_shards_that_a_state_no_longer_holds_are_not_merged(tmp_path: Path) -> None:
    run_distributed(save_sharded, 2, str(tmp_path / "pytorch_model_fsdp_0"), "model")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path)
    merge_fsdp_weights(tmp_path, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], value) for name, value in model.state_dict().items())
