"""What is put in the place of an offloaded weight: its value is kept, another weight is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model
from accel.errors import StateError
from accel.hooks import remove_hook_from_submodules
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.large.models import Dispatch

OFFLOADS: list[Dispatch] = [
    lambda model, folder: cpu_offload(model, "cpu"),
    lambda model, folder: disk_offload(model, folder, "cpu"),
]
offloads = pytest.mark.parametrize("offload", OFFLOADS)


def two(offload: Dispatch, folder: Path) -> Any:
    return offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), folder / "off")


def removed(model: Any, folder: Path) -> torch.Tensor:
    remove_hook_from_submodules(model)
    weight: torch.Tensor = model[0].weight
    return weight


def dispatched(model: Any, folder: Path) -> torch.Tensor:
    dispatch_model(model, {"": "disk"}, offload_dir=folder / "other")
    return get_state_dict_offloaded_model(model)["0.weight"]


def saved(model: Any, folder: Path) -> torch.Tensor:
    Accelerator(cpu=True).save_model(model, folder / "saved")
    return load_file(folder / "saved" / "model.safetensors")["0.weight"]


@offloads
@pytest.mark.parametrize("used", [removed, dispatched, saved])
def test_an_assigned_value_is_the_value(
    offload: Dispatch, used: Callable[[Any, Path], torch.Tensor], tmp_path: Path
) -> None:
    model = two(offload, tmp_path)
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
        model(torch.ones(1, 4))
    assert torch.equal(used(model, tmp_path), torch.ones(4, 4))


def tied(model: Any) -> None:
    model[0].weight = model[1].weight


def tied_by_data(model: Any) -> None:
    model[0].weight = nn.Parameter(model[1].weight.data)


def swapped(model: Any) -> None:
    torch.utils.swap_tensors(model[0].weight, model[1].weight)


def transposed(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.data.T)


@offloads
@pytest.mark.parametrize("change", [tied, tied_by_data, swapped, transposed])
def test_an_offloaded_weight_in_the_place_of_another_is_refused(
    offload: Dispatch, change: Callable[[Any], None], tmp_path: Path
) -> None:
    model = two(offload, tmp_path)
    change(model)
    for use in (
        lambda: model(torch.ones(1, 4)),
        lambda: get_state_dict_offloaded_model(model),
        lambda: dispatch_model(model, {"": "cpu"}),
        lambda: remove_hook_from_submodules(model),
    ):
        with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
            use()


@offloads
def test_the_data_of_another_weight_is_refused_at_once(offload: Dispatch, tmp_path: Path) -> None:
    model = two(offload, tmp_path)
    first, second = model[0].weight, model[1].weight
    for value in (second.data, second, second.detach(), first.data.t(), first.data[:, :4]):
        with pytest.raises(StateError, match=r"the data of a tensor \[4, 4\] is set to an offl"):
            first.data = value
    remove_hook_from_submodules(model)


@offloads
def test_the_same_weight_may_be_wrapped_anew_and_converted(
    offload: Dispatch, tmp_path: Path
) -> None:
    model = two(offload, tmp_path)
    expected = model(torch.ones(1, 4))
    model[0].weight.data = model[0].weight.data
    model[0].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    model[1].weight = nn.Parameter(model[1].weight.detach(), requires_grad=False)
    assert torch.equal(model(torch.ones(1, 4)), expected)
    model.bfloat16()
    assert model(torch.ones(1, 4).bfloat16()).dtype == torch.bfloat16


@offloads
def test_weights_are_not_saved_without_their_values(offload: Dispatch, tmp_path: Path) -> None:
    model, accelerator = two(offload, tmp_path), Accelerator(cpu=True)
    for value in (dict(model.named_parameters()), [*model.parameters()], model.state_dict()):
        with pytest.raises(StateError, match="has their shapes without their values"):
            accelerator.save(value, tmp_path / "weights.pt")
    remove_hook_from_submodules(model)
    accelerator.save(dict(model.named_parameters()), tmp_path / "weights.pt")
    found = torch.load(tmp_path / "weights.pt")["0.weight"]
    assert torch.equal(found, model[0].weight)
