"""The files of a model's weights: which are read, and which are refused."""

from __future__ import annotations

import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import load_checkpoint_in_model
from accel.weights import files
from tests.accel.checkpoint.test_serialization import Evil
from tests.accel.weights.test_load_weights import fails, net, same, saved


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


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system's cache takes no requests")
def test_the_next_file_is_read_while_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, max_shard_size=60)
    asked: dict[int, list[tuple[int, int]]] = {}
    second = threading.Event()

    def advise(file: int, start: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.setdefault(os.fstat(file).st_ino, []).append((start, num_bytes))
        if len(asked) == 2:
            second.set()

    monkeypatch.setattr(files, "_REQUEST", 100)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    source = files.find(tmp_path)
    parts = source.parts()
    next(parts)
    assert second.wait(60)
    assert len(list(parts)) == len(source.paths) - 1 == 3
    whole = {
        path.stat().st_ino: [(start, 100) for start in range(0, path.stat().st_size, 100)]
        for path in source.paths
    }
    assert asked == whole


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


@pytest.mark.parametrize("safe", [True, False])
def test_of_the_files_one_at_a_time_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool
) -> None:
    model = saved(tmp_path, safe=safe, max_shard_size=60)
    held: list[weakref.ref[torch.Tensor]] = []
    paths = []
    name = "read_tensors" if safe else "load_plain"
    read = getattr(files, name)

    def watched(path: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
        if kwargs.get("map_location") == "meta":  # it looks at the shapes
            return read(path, **kwargs)
        assert [one for one in held if one() is not None] == [], path
        paths.append(path)
        found = dict(read(path, **kwargs))
        held.extend(weakref.ref(tensor) for tensor in found.values())
        return found

    monkeypatch.setattr(files, name, watched)
    fresh = net().to("meta")
    load_checkpoint_in_model(fresh, tmp_path)
    assert len(paths) == len(set(paths)) > 2
    assert same(fresh, model)


def test_an_index_without_weights_has_no_parts(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert list(files.find(tmp_path).parts()) == []
