"""A weight that one module keeps on a device and another one, tied to it, offloads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import dispatch_model
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Tied

TOKENS = torch.arange(6)
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
def test_a_change_of_the_resident_one_is_seen(where: dict[str, str], tmp_path: Path) -> None:
    plain, model, resident = tied(where, tmp_path)
    with torch.no_grad():
        for _ in range(2):
            plain.get_parameter("head.weight").mul_(2)
            resident.mul_(2)
            assert torch.equal(model(TOKENS), plain(TOKENS))
    assert {one.device.type for one in model.parameters()} == {"cpu", "meta"}
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


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


def test_a_copy_has_its_own(tmp_path: Path) -> None:
    plain, model, resident = tied(RESIDENT[0], tmp_path)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        resident.zero_()
        assert torch.equal(copied(TOKENS), plain(TOKENS))
        copied.get_parameter("embedding.weight").mul_(2)
        plain.get_parameter("head.weight").mul_(2)
        assert torch.equal(copied(TOKENS), plain(TOKENS))
