"""E1, E4: offloaded weights lie in files and are mapped from there."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel.machine.errors import CheckpointError, ConfigError
from accel.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)], ids=str)
def test_a_weight_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = (torch.rand(shape) * 4).to(dtype)
    index = offload_weight(weight.T if weight.ndim == 2 else weight, "a.w", tmp_path, {})
    assert index is not None
    back = load_offloaded_weight(tmp_path / "a.w.dat", index["a.w"])
    assert back.dtype == dtype
    assert torch.equal(back.float(), (weight.T if weight.ndim == 2 else weight).float())


def test_an_index_is_added_to_if_there_is_one(tmp_path: Path) -> None:
    assert offload_weight(torch.ones(1), "a", tmp_path) is None
    entries = {"b": {"dtype": "float32", "shape": [2]}}
    save_offload_index(entries, tmp_path)
    save_offload_index({}, tmp_path)
    save_offload_index({"c": {"dtype": "float32", "shape": [1]}}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"b", "c"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.dat", "index.json"]


def test_what_has_no_data_or_is_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="meta device"):
        offload_weight(torch.ones(1, device="meta"), "a", tmp_path)
    (tmp_path / "b.dat").write_bytes(b"1234")
    for name in ("b", "c"):
        with pytest.raises(CheckpointError, match=f"{name}.dat"):
            load_offloaded_weight(tmp_path / f"{name}.dat", {"dtype": "float32", "shape": [2]})
    with pytest.raises(ConfigError, match="flaot"):
        load_offloaded_weight(tmp_path / "b.dat", {"dtype": "flaot", "shape": [1]})


def test_a_state_dict_goes_to_a_folder(tmp_path: Path) -> None:
    state = {"a": torch.rand(3), "b.c": torch.rand(2, 2).bfloat16()}
    offload_state_dict(tmp_path / "new", state)
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(weights) == ["a", "b.c"]
    assert all(torch.equal(weights[name], value) for name, value in state.items())


def test_writing_to_a_mapped_weight_leaves_the_file(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    weights["a"].zero_()
    assert weights["a"].sum() == 2


def test_a_mapped_weight_survives_that_it_is_written_again(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    mapped = OffloadedWeightsLoader(save_folder=tmp_path)["a"]
    offload_state_dict(tmp_path, {"a": torch.zeros(2)})
    assert mapped.sum() == 2


def test_safetensors_are_read_in_place(tmp_path: Path) -> None:
    # One byte first: what follows lies at an address that fp32 cannot be read from.
    state = {"a": torch.ones(1, dtype=torch.bool), "b": torch.rand(3, 2)}
    path = tmp_path / "x.safetensors"
    save_file(state, path)
    index = {
        "one": {"safetensors_file": str(path), "weight_name": "b"},
        "a": {"safetensors_file": str(path)},
        "half": {"safetensors_file": str(path), "weight_name": "b", "dtype": "float16"},
    }
    weights = OffloadedWeightsLoader(index=index)
    assert torch.equal(weights["one"], state["b"])
    assert weights["a"].item() is True
    assert torch.equal(weights["half"], state["b"].half())
    assert OffloadedWeightsLoader(index=index, device="meta")["one"].is_meta
    index["one"]["weight_name"] = "lost"
    with pytest.raises(CheckpointError, match="lost"):
        weights["one"]


def test_memory_comes_before_disk(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    weights = OffloadedWeightsLoader({"a": torch.ones(1)}, tmp_path)
    assert [weights[name].item() for name in weights] == [1.0, 0.0]
    assert [weights.in_memory(name) for name in weights] == [True, False]
    assert len(weights) == 2
    assert len(pickle.loads(pickle.dumps(weights))) == 2
    with pytest.raises(KeyError):
        weights["c"]
    with pytest.raises(ConfigError, match="save_folder"):
        OffloadedWeightsLoader()


def test_a_part_of_a_mapping() -> None:
    part = PrefixedDataset({"a.b": 1, "a.c": 2, "d": 3}, "a.")
    assert dict(part) == {"b": 1, "c": 2}
    assert len(part) == 2
    state = {"a.b": 1, "ab": 2, "d": 3, "d.e": 4}
    assert extract_submodules_state_dict(state, ["a", "d"]) == {"a.b": 1, "d": 3, "d.e": 4}


@pytest.mark.parametrize("text", [b"{bad", b"\xff", b"[1]", b'{"a": 1}'])
def test_a_broken_index_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "index.json").write_bytes(text)
    for call in (
        lambda: OffloadedWeightsLoader(save_folder=tmp_path),
        lambda: offload_state_dict(tmp_path, {"a": torch.ones(1)}),
    ):
        with pytest.raises(CheckpointError, match=r"index\.json.*JSON object.*Remove the file"):
            call()
