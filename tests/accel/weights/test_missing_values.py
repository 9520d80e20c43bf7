"""E4: tensors without values that no hook and no folder has are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import remove_hook_from_submodules
from accel.machine.errors import ConfigError, StateError
from tests.accel.weights.models import Dispatch, inputs, net

DISPATCHES: list[Dispatch] = [
    lambda model, folder: disk_offload(model, folder, "cpu"),
    lambda model, folder: dispatch_model(model, {"0": "disk", "": "cpu"}, offload_dir=folder),
    lambda model, folder: dispatch_model(model, {"": "cpu"}, offload_dir=folder),
    lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    lambda model, folder: cpu_offload(model, "cpu"),
]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
    for number, value in enumerate(model.buffers()):
        value.fill_(number + 1)
    return model.eval()


def left(tmp_path: Path, written: bool = False, **options: Any) -> nn.Sequential:
    """Return a model that never had its weights in memory, and whose hooks were removed."""
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


# -- what users do to models ---------------------------------------------------------------


def deleted(model: Any) -> None:
    del model[1]


def swapped(model: Any) -> None:
    model[0], model[1] = model[1], model[0]


def tied(model: Any) -> None:
    model[0][0].weight = model[1][0].weight


def rounded(model: Any) -> None:
    model.half().float()


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("change", [deleted, swapped, tied, rounded])
def test_the_values_go_where_the_weights_go(
    dispatch: Dispatch, change: Callable[[Any], None], tmp_path: Path
) -> None:
    model, expected = left(tmp_path, written=change is swapped), layers()
    change(model)
    change(expected)
    for _ in range(2):
        assert is_like(model, expected)
        dispatch(model, tmp_path / "off")
        assert is_like(model, expected)
        remove_hook_from_submodules(model)


@pytest.mark.parametrize("dispatch", DISPATCHES[:-1])
def test_a_layer_that_is_moved_before_the_first_dispatch_is_refused(
    dispatch: Dispatch, tmp_path: Path
) -> None:
    Accelerator(cpu=True).save_model(layers(), tmp_path / "weights")
    model = layers().to("meta")
    load_checkpoint_in_model(
        model, tmp_path / "weights", {"": "disk"}, offload_folder=tmp_path / "off"
    )
    del model[1]
    with pytest.raises(ConfigError, match=r"weights 1\.0\.weight.* layers were moved"):
        dispatch(model, tmp_path / "off")


def test_without_their_files_they_are_left_without_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = disk_offload(layers().to("cpu"), tmp_path / "off", "cpu")
    (tmp_path / "off" / "0.0.weight.dat").unlink()
    with caplog.at_level(logging.WARNING):
        remove_hook_from_submodules(model)
    assert "weight of Linear is left without values: " in caplog.text
    assert "0.0.weight.dat': it was written or removed since" in caplog.text
    with pytest.raises(StateError, match="its values are loaded"):
        model(inputs())
    with pytest.raises(ConfigError, match=r"weights 0\.0\.weight: they have no values"):
        cpu_offload(model, "cpu")
    Accelerator(cpu=True).save_model(layers(), tmp_path / "weights")
    load_checkpoint_in_model(model, tmp_path / "weights")
    assert is_like(model, layers())


class Adapter(nn.Module):
    """A layer with an adapter beside it, made where the weight of the layer lies, as by peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.added = nn.Linear(4, 4, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.added(x)
        return out


class Wrapper(nn.Module):
    """Runs a model, as the class of peft does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out


def offloaded(kind: str, folder: Path) -> nn.Module:
    """Return `net` with its last block offloaded, and maybe others."""
    if kind == "cpu":
        return cpu_offload(net(), "cpu", offload_buffers=True)
    if kind == "disk":
        return disk_offload(net(), folder, "cpu")
    devices = {"": "disk"} if kind == "everything" else {"0": "cpu", "1": "disk"}
    return dispatch_model(net(), devices, offload_dir=folder)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "disk", "everything", "blocks"])
def test_an_adapter_without_values_is_refused(kind: str, before: bool, tmp_path: Path) -> None:
    model = offloaded(kind, tmp_path)
    if before:  # the model ran when it had no adapter
        model(inputs())
    model[1].linear = Adapter(model[1].linear)
    message = r"1\.linear\.added\.weight, 1\.linear\.added\.bias of Sequential.*before dispatch"
    for _ in range(2):
        with pytest.raises(StateError, match=message):
            Wrapper(model)(inputs())
    model[1].linear.added = nn.Linear(4, 4)
    model[1].linear.added.requires_grad_(False).weight.zero_()
    model[1].linear.added.bias.zero_()
    assert torch.equal(model(inputs()), net()(inputs()))
