"""E4: tensors without values that no hook and no folder has are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model, load_checkpoint_in_model
from accel.machine.errors import ConfigError, StateError
from tests.accel.weights.models import inputs, net

# -- what users do to models ---------------------------------------------------------------


def test_a_layer_that_is_moved_before_the_first_dispatch_is_refused(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
    Accelerator(cpu=True).save_model(layers, tmp_path / "weights")
    model = layers.to("meta")
    load_checkpoint_in_model(
        model, tmp_path / "weights", {"": "disk"}, offload_folder=tmp_path / "off"
    )
    del model[1]
    with pytest.raises(ConfigError, match=r"weights 1\.0\.weight.* layers were moved"):
        disk_offload(model, tmp_path / "off", "cpu")


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
