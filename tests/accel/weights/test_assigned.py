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
from accel.hooks import remove_hook_from_submodules
from accel.machine.errors import StateError
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Dispatch

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


class Twice(nn.Module):
    """A module that has one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(4.0))
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.first + self.second


@offloads
@pytest.mark.parametrize("name", ["first", "second"])
def test_an_assigned_name_of_a_weight_leaves_the_other(
    offload: Dispatch, name: str, tmp_path: Path
) -> None:
    model: Any = offload(Twice(), tmp_path)
    setattr(model, name, nn.Parameter(torch.ones(4)))
    with pytest.raises(StateError, match=f"{name} of Twice: offloaded tensors were assigned"):
        model(torch.ones(4))
    expected = {"first": torch.arange(4.0), "second": torch.arange(4.0), name: torch.ones(4)}
    state = get_state_dict_offloaded_model(model)
    remove_hook_from_submodules(model)
    for one, value in expected.items():
        assert torch.equal(state[one], value)
        assert torch.equal(getattr(model, one), value)


@offloads
@pytest.mark.parametrize("assigned", [0, 1])
def test_a_value_that_is_assigned_to_a_tied_weight_is_its_alone(
    offload: Dispatch, assigned: int, tmp_path: Path
) -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    value, x = tied[0].weight.detach().clone(), torch.ones(1, 4)
    model: Any = offload(tied, tmp_path)
    model[assigned].weight = nn.Parameter(torch.ones(4, 4))
    assert torch.allclose(model[1 - assigned](x), x @ value.T)
    state = get_state_dict_offloaded_model(model)
    remove_hook_from_submodules(model)
    for number, expected in ((assigned, torch.ones(4, 4)), (1 - assigned, value)):
        assert torch.equal(state[f"{number}.weight"], expected)
        assert torch.equal(model[number].weight, expected)


@offloads
def test_a_refused_removal_changes_nothing(offload: Dispatch, tmp_path: Path) -> None:
    model: Any = offload(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), tmp_path)
    model[1].weight = model[2].weight
    with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
        remove_hook_from_submodules(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(hasattr(layer, "_hf_hook") for layer in model)


@offloads
def test_weights_train_whose_hooks_were_removed_in_inference_mode(
    offload: Dispatch, tmp_path: Path
) -> None:
    model = two(offload, tmp_path)
    with torch.inference_mode():
        remove_hook_from_submodules(model)
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].weight.grad is not None
