"""Tied weights of a checkpoint that has one of their names, as safetensors files do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel import Accelerator, load_checkpoint_and_dispatch
from accel.machine.errors import StateError
from accel.utils import set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Block, Tied, inputs

NAMES = ["embedding.weight", "head.weight"]
MAPS: list[dict[str, Any] | None] = [
    None,
    {"": "cpu"},
    {"": "disk"},
    {"embedding": "disk", "block": "cpu", "head": "disk"},
    {"embedding": "disk", "": "cpu"},
    {"head": "disk", "": "cpu"},
]


def seeded(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()


def save(model: Tied, name: str, folder: Path, kind: str) -> Path:
    """Write the weights of a model, the tied one under `name` alone."""
    left_out = set(NAMES) - {name}
    state = {key: value.clone() for key, value in model.state_dict().items() if key not in left_out}
    folder.mkdir()
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return folder


def is_equal(found: dict[str, torch.Tensor], wanted: Tied, dtype: torch.dtype | None) -> bool:
    expected = {
        key: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for key, value in wanted.state_dict().items()
    }
    assert found.keys() == expected.keys()
    return all(
        value.dtype == found[key].dtype and torch.equal(value, found[key])
        for key, value in expected.items()
    )


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_the_loaded_value(
    name: str,
    device_map: dict[str, Any] | None,
    dtype: torch.dtype | None,
    kind: str,
    tmp_path: Path,
) -> None:
    source, model = seeded(0), seeded(1)
    model.block.shift.copy_(source.block.shift)  # in no checkpoint
    load_checkpoint_and_dispatch(
        model,
        save(source, name, tmp_path / "weights", kind),
        device_map=device_map,
        offload_folder=tmp_path / "off",
        dtype=dtype,
        strict=True,
    )
    assert is_equal(get_state_dict_offloaded_model(model), source, dtype)
    if dtype is None:
        tokens = torch.tensor([1, 2])
        assert torch.equal(model(tokens), source(tokens))
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    both = {**saved, **{key: saved[one] for key in NAMES for one in NAMES if one in saved}}
    assert is_equal(both, source, dtype)


def test_what_is_offloaded_stays_tied(tmp_path: Path) -> None:
    model = seeded(1)
    load_checkpoint_and_dispatch(
        model,
        save(seeded(0), NAMES[0], tmp_path / "weights", "safetensors"),
        device_map={"": "disk"},
        offload_folder=tmp_path / "off",
    )
    assert not list((tmp_path / "off").glob("*weight.dat"))  # all names read the checkpoint
    with pytest.raises(StateError, match="tied to others"):
        set_module_tensor_to_device(model, NAMES[1], "cpu", value=torch.ones(6, 4))


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "disk"},
        {"0": "disk", "1": "cpu", "2": "disk"},
        {"0": "disk", "1": "cpu", "2": "disk", "2.norm.running_mean": "cpu"},
    ],
)
def test_a_module_may_be_in_several_places(device_map: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = Block()
    source = nn.Sequential(block, Block(), block).eval()
    source[0].norm.running_mean.fill_(1)
    Accelerator(cpu=True).save_model(source, tmp_path / "weights")
    model = copy.deepcopy(source)
    for value in model.state_dict().values():
        value.zero_()
    load_checkpoint_and_dispatch(
        model, tmp_path / "weights", device_map, offload_folder=tmp_path / "off", strict=True
    )
    assert torch.equal(model(inputs()), source(inputs()))
