"""State is saved of a model whose weights are offloaded, and loaded into such a one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accel.machine.errors import CheckpointError
from accel.utils import set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Tied, inputs, net, on_meta


class Adapted(nn.Module):
    """A frozen base and a low-rank adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Run:
    """A training run of an adapter over an offloaded base."""

    def __init__(self, folder: Path, device_map: dict[str, Any] | None) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = Adapted()
        if device_map is not None:
            dispatch_model(model, device_map, offload_dir=folder, offload_buffers=True)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            torch.manual_seed(number)
            loss = self.model(torch.rand(3, 4)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


DISK: dict[str, Any] = {"base": "disk", "": "cpu"}


@pytest.mark.parametrize("second", [DISK, None])
@pytest.mark.parametrize("first", [DISK, None])
def test_an_adapter_of_an_offloaded_base_resumes(
    first: dict[str, Any] | None, second: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = Run(tmp_path / "first", first)
    run.steps(0, 1)
    run.accelerator.save_state(tmp_path / "state")
    losses = run.steps(2, 3, 4)
    run.accelerator.free_memory()
    resumed = Run(tmp_path / "second", second)
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.steps(2, 3, 4) == losses
    ours = get_state_dict_offloaded_model(resumed.model)
    theirs = get_state_dict_offloaded_model(run.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "base.0.weight" in on_meta(resumed.model) or second is None


def test_weights_in_memory_are_loaded_where_they_lie() -> None:
    expected = net()
    expected[1].linear.weight.data.fill_(1)
    model = cpu_offload(net(), "cpu")
    model.load_state_dict(expected.state_dict())
    assert torch.equal(model(inputs()), expected(inputs()))
    expected[0].linear.weight.data.fill_(2)
    model.load_state_dict(expected.state_dict(), assign=True)
    assert on_meta(model) > {"1.linear.weight"}
    assert torch.equal(model(inputs()), expected(inputs()))


@pytest.mark.parametrize("strict", [True, False])
def test_other_weights_on_disk_are_refused_with_the_remedy(strict: bool, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    other = accelerator.prepare_model(net())
    other[1].linear.weight.data.fill_(1)
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare_model(disk_offload(net(), tmp_path / "off", "cpu"))
    rule = r"1.linear.weight: offloaded .*(?<!strict=False\. )Load the checkpoint before the model"
    with pytest.raises(CheckpointError, match=rule) as caught:
        accelerator.load_state(tmp_path / "state", strict=strict)
    assert "strict=False" not in str(caught.value)


def test_tied_weights_are_compared(tmp_path: Path) -> None:
    model = Tied()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    disk_offload(model, tmp_path, "cpu")
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"embedding.weight: offloaded weights cannot be loaded"):
        model.load_state_dict({**state, "embedding.weight": torch.zeros(6, 4)})
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding.weight"):
        model.load_state_dict({**state, "embedding.weight": torch.zeros(7, 4)})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("assign", [True, False])
def test_a_refused_load_leaves_the_model_as_it_was(assign: bool, tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path, "cpu")
    other = {name: value + 1 for name, value in net().state_dict().items()}
    rule = r"1.scale: offloaded weights cannot .*Load them with accel.load_checkpoint_and_dispatch"
    with pytest.raises(RuntimeError, match=rule):
        model.load_state_dict(other, assign=assign)
    model.load_state_dict(net().state_dict(), assign=assign)  # buffers, which are not offloaded
    assert torch.equal(model(inputs()), net()(inputs()))


def test_a_state_dict_without_values_is_assigned_to_no_harm(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "off", "cpu")
    model.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(model(inputs()), net()(inputs()))
    with init_empty_weights():
        fresh = net()
    fresh.load_state_dict(model.state_dict(), strict=False, assign=True)
    for name, value in net().state_dict().items():
        set_module_tensor_to_device(fresh, name, "cpu", value)
    torch.save(fresh.state_dict(), tmp_path / "full.pt")
    assert {type(weight) for weight in fresh.parameters()} == {nn.Parameter}
