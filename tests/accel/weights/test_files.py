"""R4, E4: weight files are found, checked and read one after the other; shards are merged."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from accel import PartialState, load_checkpoint_in_model
from accel.machine.errors import CheckpointError
from accel.utils import merge_fsdp_weights
from tests.accel.checkpoint.test_serialization import Evil
from tests.accel.weights.test_load import fails, net, same, saved
from tests.helpers import run_distributed


def test_folders_that_do_not_tell_what_is_meant(tmp_path: Path) -> None:
    assert "no such file or folder" in fails(load_checkpoint_in_model, net(), tmp_path / "none")
    assert "no index of shards" in fails(load_checkpoint_in_model, net(), tmp_path)
    saved(tmp_path)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    message = fails(load_checkpoint_in_model, net(), tmp_path)
    assert "model.safetensors, other.safetensors.index.json" in message


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    saved(tmp_path, safe=False)
    model, fresh = saved(tmp_path), net()
    load_checkpoint_in_model(fresh, tmp_path)
    assert same(fresh, model)


def test_a_damaged_index_is_told(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size=60)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text("[]")
    assert "it is no index of shards" in fails(load_checkpoint_in_model, net(), tmp_path)
    index.write_text(json.dumps({"weight_map": {"0.weight": "../model.safetensors"}}))
    assert "lie elsewhere" in fails(load_checkpoint_in_model, net(), tmp_path)
    body = json.loads(text)
    body["weight_map"] |= {"2.more": body["weight_map"]["2.bias"]}
    index.write_text(json.dumps(body))
    assert "its shards lack 2.more (in model-0" in fails(load_checkpoint_in_model, net(), tmp_path)
    index.write_text(text)
    for path in list(tmp_path.glob("model-0000[23]*")):
        path.unlink()
    message = fails(load_checkpoint_in_model, net(), tmp_path)
    assert "lacks model-00002-of-00004.safetensors, model-00003-of-00004.safetensors" in message


def test_files_that_are_broken_or_would_run_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"0.weight": Evil()}, tmp_path / "pytorch_model.bin")
    assert "could run code" in fails(load_checkpoint_in_model, net(), tmp_path)
    assert "code ran" not in caplog.text
    torch.save([1], tmp_path / "pytorch_model.bin")
    assert "it holds a list" in fails(load_checkpoint_in_model, net(), tmp_path)
    saved(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    message = fails(load_checkpoint_in_model, net(), tmp_path)
    assert "no complete safetensors file" in message


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
