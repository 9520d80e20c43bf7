"""E4: tied weights of a dispatched model stay one weight."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel import (
    Accelerator,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel.machine.errors import ConfigError
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Tied, inputs, net

TOKENS = torch.arange(6)


def made(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()


def empty() -> Tied:
    with init_empty_weights(include_buffers=False):
        return Tied().eval()


def test_a_state_dict_of_another_model_without_values_is_refused(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path / "a", "cpu")
    other = disk_offload(made(1), tmp_path / "b", "cpu")
    for state in (other.state_dict(), empty().state_dict()):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=r"embedding\.weight: the state dict has no val"):
                model.load_state_dict(state, assign=assign)
    before = model(TOKENS)
    for copied in (model, copy.deepcopy(model)):
        copied.load_state_dict(copied.state_dict())
        assert torch.equal(copied(TOKENS), before)


# -- removal -------------------------------------------------------------------------------


def test_an_optimizer_of_offloaded_weights_that_train_is_refused(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "all", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"\d+ offloaded weights that are to train"):
        Accelerator(cpu=True).prepare(model, optimizer)
    model.requires_grad_(False)
    Accelerator(cpu=True).prepare(model, optimizer)


def test_of_an_optimizer_of_some_offloaded_weights_the_others_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    dispatch_model(model, {"0": "disk", "1": "cpu"}, "cpu", offload_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "2 offloaded weights of an optimizer do not train" in caplog.text
    before = model[1].weight.clone()
    with torch.no_grad():
        hidden = model[0](inputs())
    accelerator.backward(model[1](hidden).sum())
    optimizer.step()
    assert not torch.equal(model[1].weight, before)


NAMES = ["embedding.weight", "head.weight"]
MAPS: list[dict[str, Any] | None] = [
    None,
    {"": "cpu"},
    {"": "disk"},
    {"embedding": "disk", "block": "cpu", "head": "disk"},
    {"embedding": "disk", "": "cpu"},
    {"head": "disk", "": "cpu"},
]


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
    source, model = made(0), made(1)
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


RESIDENT = [
    {"embedding": "cpu", "block": "disk", "head": "disk"},
    {"embedding": "disk", "block": "cpu", "head": "cpu"},
]


def tied(where: dict[str, str], folder: Path) -> tuple[nn.Module, nn.Module, nn.Parameter]:
    """Return a plain model, the dispatched one and its weight that is resident."""
    torch.manual_seed(0)
    plain = Tied().eval()
    model = dispatch_model(copy.deepcopy(plain), where, "cpu", offload_dir=folder)
    name = "embedding.weight" if where["embedding"] == "cpu" else "head.weight"
    return plain, model, model.get_parameter(name)


@pytest.mark.parametrize("where", RESIDENT)
def test_the_resident_one_trains(where: dict[str, str], tmp_path: Path) -> None:
    plain, model, resident = tied(where, tmp_path)
    for one in (plain, model):
        one.requires_grad_(False)
        one.get_parameter("embedding.weight").requires_grad_(True)
        one.get_parameter("head.weight").requires_grad_(True)
        one(TOKENS).square().sum().backward()
    assert resident.grad is not None
    assert torch.equal(resident.grad, plain.get_parameter("head.weight").grad)
