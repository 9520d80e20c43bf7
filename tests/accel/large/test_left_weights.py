"""Weights whose hooks were removed are found by the name and in the file that they had."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import (
    Accelerator,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.errors import ConfigError
from accel.hooks import remove_hook_from_submodules
from accel.utils import offload_state_dict
from tests.accel.large.models import TO_DISK, Dispatch, inputs

DISPATCHES: list[Dispatch] = [
    *TO_DISK,
    lambda model, folder: dispatch_model(model, {"": "cpu"}, offload_dir=folder),
    lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
    for number, value in enumerate(model.buffers()):
        value.fill_(number + 1)
    return model.eval()


def left(tmp_path: Path, written: bool = False, **options: Any) -> nn.Sequential:
    """Return a model without values or hooks, whose weights lie in the folder "off"."""
    Accelerator(cpu=True).save_model(layers(), tmp_path / "weights", safe_serialization=not written)
    with init_empty_weights(include_buffers=True):
        model = layers()
    load_checkpoint_and_dispatch(
        model, tmp_path / "weights", {"": "disk"}, offload_folder=tmp_path / "off", **options
    )
    remove_hook_from_submodules(model)
    return model


def is_like(model: nn.Module, expected: nn.Module) -> bool:
    # Not bit by bit: the address of a weight decides the kernel that computes with it.
    return torch.allclose(model(inputs()), expected(inputs()))


def unchanged(model: nn.Module) -> nn.Module:
    return model


def pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("copied", [unchanged, copy.deepcopy, pickled])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_a_layer_may_be_deleted(
    dispatch: Dispatch,
    copied: Callable[[nn.Module], nn.Module],
    written: bool,
    offload_buffers: bool,
    tmp_path: Path,
) -> None:
    model: Any = copied(left(tmp_path, written, offload_buffers=offload_buffers))
    expected = layers()
    del model[1], expected[1]
    for _ in range(2):
        dispatch(model, tmp_path / "off")
        assert is_like(model, expected)
        remove_hook_from_submodules(model)


@pytest.mark.parametrize("dispatch", DISPATCHES[:2])
def test_layers_may_be_moved_and_added(dispatch: Dispatch, tmp_path: Path) -> None:
    first, expected = left(tmp_path, written=True), layers()
    added = nn.Linear(4, 4)  # written where the first one lay
    model = nn.ModuleDict({"0": nn.Sequential(added), "1": nn.Sequential(first[2], first[0])})
    dispatch(model, tmp_path / "off")
    wanted = nn.Sequential(expected[2], expected[0])
    assert is_like(model["1"], wanted)
    assert is_like(model["0"], added) or model["0"][0].weight.is_meta


def test_what_cannot_be_found_is_refused_with_its_names(tmp_path: Path) -> None:
    model = left(tmp_path, written=True)
    del model[1]
    rule = r"weights 1.0.weight \(was 2.0.weight\), 1.0.bias \(was 2.0.bias\).* other names"
    state = layers().state_dict()
    offload_state_dict(tmp_path / "other", state)
    with pytest.raises(ConfigError, match=rule):
        dispatch_model(model, {"": "cpu"}, offload_dir=tmp_path / "other")
    info = {name: {"dtype": "float32", "shape": list(v.shape)} for name, v in state.items()}
    with pytest.raises(ConfigError, match="do not lie under the present ones"):
        dispatch_model(model, {"": "disk"}, "cpu", offload_dir=tmp_path / "off", offload_index=info)
    assert model[0][0].weight.is_meta
    offload_state_dict(tmp_path / "off", {"2.0.weight": torch.ones(4, 4)})
    with pytest.raises(ConfigError, match=r"weights 1.0.weight \(was 2.0.weight\): they have"):
        disk_offload(model, tmp_path / "off", "cpu")


def test_an_index_may_have_the_present_names(tmp_path: Path) -> None:
    model, expected = left(tmp_path), layers()
    del model[1], expected[1]
    file = str(tmp_path / "weights" / "model.safetensors")
    index = {
        name: {"safetensors_file": file, "weight_name": name.replace("1.", "2.", 1)}
        if name.startswith("1.")
        else {"safetensors_file": file}
        for name in expected.state_dict()
    }
    for place in ("cpu", "disk"):
        dispatch_model(copy.deepcopy(model), {"": place}, "cpu", offload_index=index)
    dispatch_model(model, {"": "cpu"}, offload_index=index)
    assert is_like(model, expected)


def test_values_of_the_present_names_may_be_given(tmp_path: Path) -> None:
    model, expected = left(tmp_path), layers()
    del model[1], expected[1]
    save_file(expected.state_dict(), tmp_path / "pruned.safetensors")
    for folder in ("off", "other"):
        load_checkpoint_and_dispatch(
            model, tmp_path / "pruned.safetensors", {"": "disk"}, offload_folder=tmp_path / folder
        )
        assert is_like(model, expected)
        remove_hook_from_submodules(model)


def test_a_layer_may_be_deleted_before_the_first_dispatch(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(layers(), tmp_path / "weights")
    model, expected = layers().to("meta"), layers()
    off = tmp_path / "off"
    load_checkpoint_in_model(model, tmp_path / "weights", {"": "disk"}, offload_folder=off)
    del model[0], expected[0]
    dispatch_model(model, {"": "disk"}, offload_dir=off)
    assert is_like(model, expected)


def test_tied_weights_are_found_by_any_name(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    expected = copy.deepcopy(model[1])
    Accelerator(cpu=True).save_model(model, tmp_path / "weights")
    model = load_checkpoint_and_dispatch(
        model.to("meta"), tmp_path / "weights", {"": "disk"}, offload_folder=tmp_path / "off"
    )
    remove_hook_from_submodules(model)
    del model[0]
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "off")
    assert is_like(model[0], expected)


def test_an_index_may_be_of_files_that_are_written_anew(tmp_path: Path) -> None:
    """As peft writes them, under the names that its adapters give to weights."""
    model = nn.ModuleDict({"base": left(tmp_path)})
    file = str(tmp_path / "new.safetensors")
    save_file({f"base.{name}": value for name, value in layers().state_dict().items()}, file)
    index = {
        f"base.{name}": {"safetensors_file": file, "weight_name": f"base.{name}"}
        for name in layers().state_dict()
    }
    dispatch_model(model, {"": "disk"}, "cpu", offload_dir=tmp_path / "more", offload_index=index)
    assert is_like(model["base"], layers())
