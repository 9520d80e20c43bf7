"""E1, E4: a dispatched model computes what it computes in memory; the last dispatch holds."""

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
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel.machine.errors import ConfigError, StateError
from accel.utils import OffloadedWeightsLoader, offload_state_dict, set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from accel.weights.hooks import hooks_of
from tests.accel.weights.models import TO_DISK, Direct, Dispatch, hook_of, inputs, net, on_meta

HALF = {"0": "cpu", "1": "disk"}
PARAMETERS = {name for name, _ in net().named_parameters()}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in net().state_dict().items()}


def ghost() -> nn.Module:
    """Return `net` on the meta device, but for buffers that no checkpoint has."""
    model = net().to("meta")
    for block, full in zip(model, net(), strict=True):
        block.shift = full.shift
    return model


def shift() -> torch.Tensor:
    """Return what `net` computes with `zeros`."""
    shifted: torch.Tensor = net()[1].shift.expand(2, 4)
    return shifted


# -- all weights ---------------------------------------------------------------------------


def test_weights_stay_in_memory() -> None:
    model = net()
    assert cpu_offload(model, "cpu") is model
    assert on_meta(model) == PARAMETERS
    assert torch.equal(model(inputs()), net()(inputs()))
    remove_hook_from_submodules(model)
    assert on_meta(model) == set()


def test_modules_compute_on_the_execution_device(tmp_path: Path) -> None:
    for model in (
        cpu_offload(net(), execution_device="meta"),
        disk_offload(net(), tmp_path, execution_device="meta"),
    ):
        assert model(inputs().to("meta")).is_meta
        assert hook_of(model[0]).execution_device == "meta"
    assert hook_of(cpu_offload(net())[0]).execution_device == torch.device("cpu")
    empty = cpu_offload(ghost(), state_dict=zeros())
    assert hook_of(empty[0]).execution_device != torch.device("meta")


def test_buffers_are_offloaded_on_request(tmp_path: Path) -> None:
    for model in (
        cpu_offload(net(), "cpu", offload_buffers=True),
        disk_offload(net(), tmp_path, "cpu", offload_buffers=True),
    ):
        assert on_meta(model) > PARAMETERS
        assert torch.equal(model(inputs()), net()(inputs()))


def test_a_state_dict_may_be_given() -> None:
    model = cpu_offload(net(), "cpu", state_dict=zeros())
    assert torch.equal(model(inputs()), shift())


def test_a_class_may_load_all_weights_within(tmp_path: Path) -> None:
    model = Direct()
    with torch.no_grad():
        expected = model(inputs())
    cpu_offload(model, "cpu", preload_module_classes=["Direct"])
    assert torch.equal(model(inputs()), expected)
    remove_hook_from_submodules(model)
    disk_offload(model, tmp_path, "cpu", preload_module_classes=["Direct"])
    assert torch.equal(model(inputs()), expected)


def test_weights_lie_on_disk(tmp_path: Path) -> None:
    model = net()
    assert disk_offload(model, tmp_path, "cpu") is model
    assert on_meta(model) == PARAMETERS
    assert set(OffloadedWeightsLoader(save_folder=tmp_path)) == set(model.state_dict())
    assert torch.equal(model(inputs()), net()(inputs()))
    again = disk_offload(ghost(), tmp_path, "cpu", offload_buffers=True)
    assert torch.equal(again(inputs()), net()(inputs()))


@pytest.mark.parametrize(
    "offload",
    [
        lambda model, _: cpu_offload(model, "cpu", state_dict=zeros()),
        lambda model, folder: disk_offload(model, folder, "cpu"),
        lambda model, folder: dispatch_model(model, HALF, offload_dir=folder),
        lambda model, folder: dispatch_model(model, {"": "cpu"}, offload_dir=folder),
    ],
)
def test_buffers_that_nothing_has_a_value_for_are_refused(
    offload: Callable[[nn.Module, Path], object], tmp_path: Path
) -> None:
    """Each forward pass would compute from whatever lies in memory."""
    offload_state_dict(tmp_path, zeros())
    model = net().to("meta")
    message = r"non-persistent buffers 0\.shift, 1\.shift.*include_buffers=False"
    with pytest.raises(ConfigError, match=message):
        offload(model, tmp_path)
    for name in ("0.shift", "1.shift"):
        set_module_tensor_to_device(model, name, "cpu", value=torch.ones(4))
    disk_offload(model, tmp_path, "cpu")  # statistics, which no hook loads, come from there, too
    assert torch.equal(model(inputs()), torch.ones(2, 4))


# -- one after the other -------------------------------------------------------------------


def test_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, str]] = []
    to = nn.Module.to

    def spy(module: nn.Module, device: torch.device | str) -> nn.Module:
        moved.append((module.name, str(device)))
        return to(module, "cpu")

    monkeypatch.setattr(nn.Module, "to", spy)
    first, second = nn.Identity(), nn.Identity()
    first.name, second.name = "first", "second"
    model, handle = cpu_offload_with_hook(first, "meta")
    assert model is first
    cpu_offload_with_hook(second, "meta", prev_module_hook=handle)
    moved.clear()
    assert second(first(inputs())).is_meta
    assert moved == [("first", "meta"), ("first", "cpu"), ("second", "meta")]
    handle.remove()
    assert not hasattr(first, "_hf_hook")


# -- device maps ---------------------------------------------------------------------------


def test_a_device_map_places_a_model(tmp_path: Path) -> None:
    model = net()
    assert dispatch_model(model, HALF, offload_dir=tmp_path) is model
    assert on_meta(model) == {name for name in PARAMETERS if name.startswith("1.")}
    assert model.hf_device_map == HALF
    assert torch.equal(model(inputs()), net()(inputs()))
    assert {path.name[:2] for path in tmp_path.glob("*.dat")} == {"1."}


def test_one_device_needs_no_hooks_unless_they_are_forced() -> None:
    model = dispatch_model(net(), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert model.hf_device_map == {"": "cpu"}
    assert hasattr(dispatch_model(net(), {"": "cpu"}, force_hooks=True), "_hf_hook")


def test_offloaded_modules_run_on_the_main_device() -> None:
    model = dispatch_model(net(), {"0": "cpu", "1": "cpu"}, main_device="meta", force_hooks=True)
    assert on_meta(model) >= PARAMETERS
    assert model(inputs().to("meta")).is_meta
    remove_hook_from_submodules(model)
    assert on_meta(model) & PARAMETERS == set()


def test_weights_in_memory_may_be_given() -> None:
    device_map = {"0": "cpu", "1": "cpu"}
    model = dispatch_model(
        net(), device_map, main_device="meta", state_dict=zeros(), force_hooks=True
    )
    assert hook_of(model[0].linear).weight("weight").sum() == 0


def test_an_index_may_be_given(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, zeros())
    index = OffloadedWeightsLoader(save_folder=tmp_path).index
    (tmp_path / "index.json").unlink()
    model = dispatch_model(
        net(), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path, offload_index=index
    )
    assert torch.equal(model(inputs()), shift())


def test_buffers_of_a_map_are_offloaded_on_request(tmp_path: Path) -> None:
    model = dispatch_model(net(), HALF, offload_dir=tmp_path, offload_buffers=True)
    assert "1.norm.running_mean" in on_meta(model)
    assert torch.equal(model(inputs()), net()(inputs()))


def test_some_arguments_stay() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"y": y}

    model = dispatch_model(Named(1, 1), {"": "cpu"}, skip_keys="y", force_hooks=True)
    assert model(inputs(), y=inputs().to("meta"))["y"].is_meta


def test_a_class_of_a_map_may_load_all_weights_within(tmp_path: Path) -> None:
    model = nn.Sequential(Direct(), Direct())
    expected = model(inputs())
    dispatch_model(model, HALF, offload_dir=tmp_path, preload_module_classes=["Direct"])
    assert torch.equal(model(inputs()), expected)


def test_what_a_map_lacks_is_told() -> None:
    with pytest.raises(ConfigError, match="We need an `offload_dir`"):
        dispatch_model(net(), HALF)
    with pytest.raises(ConfigError, match="any device for the following"):
        dispatch_model(net(), {"0": "cpu"})


def test_a_dispatched_model_is_not_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = dispatch_model(net(), HALF, offload_dir=tmp_path)
    with pytest.raises(StateError, match="You can't move a model"):
        model.to("cpu")
    hooked = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    with caplog.at_level(logging.WARNING):
        assert hooked.to("cpu") is hooked
    assert "You shouldn't move a model" in caplog.text


def test_an_accelerator_takes_a_dispatched_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(dispatch_model(net(), HALF, offload_dir=tmp_path / "off"))
    assert on_meta(model) == {name for name in PARAMETERS if name.startswith("1.")}
    assert torch.equal(model(inputs()), net()(inputs()))
    full = net().state_dict()
    state = accelerator.get_state_dict(model)
    assert state.keys() == full.keys()
    assert all(torch.equal(state[name], value) for name, value in full.items())
    accelerator.save_model(model, tmp_path / "export")
    fresh = net()
    load_checkpoint_in_model(fresh, tmp_path / "export", strict=True)
    assert torch.equal(fresh(inputs()), net()(inputs()))


def hooks(model: nn.Module) -> list[int]:
    return [len(hooks_of(module)) for module in model.modules()]


DISPATCHES: list[Dispatch] = [
    *TO_DISK,
    lambda model, folder: cpu_offload(model, "cpu"),
    lambda model, folder: dispatch_model(
        model, {"0": "cpu", "1": "disk"}, offload_dir=folder, offload_buffers=True
    ),
]
LOADED_MAPS: list[Any] = [{"": "disk"}, {"": "cpu"}, {"0": "disk", "1": "cpu"}, "auto"]


def test_hooks_of_others_stay(tmp_path: Path) -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    model = disk_offload(net(), tmp_path, "cpu")
    add_hook_to_module(model[1], Doubling(), append=True)
    for _ in range(2):
        add_hook_to_module(model[0].norm, ModelHook(), append=True)
    dispatch_model(model, {"": "cpu"})
    assert torch.equal(model(inputs()), net()(inputs()) * 2)
    assert hooks(model[0]) == [0, 2, 0]
    assert isinstance(model[1]._hf_hook, Doubling)


def other() -> nn.Sequential:
    """Return a model like `net` with other weights, and the same buffers that no file has."""
    model = net()
    for parameter in model.parameters():
        parameter.data.add_(1)
    model[0].norm.running_mean.add_(1)
    return model


def saved(model: nn.Module, folder: Path) -> Path:
    Accelerator(cpu=True).save_model(model, folder)
    return folder


@pytest.mark.parametrize("device_map", LOADED_MAPS)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("folder", ["one", "other"])
def test_the_new_weights_are_computed_with(
    dispatch: Dispatch, device_map: Any, folder: str, tmp_path: Path
) -> None:
    model = dispatch(net(), tmp_path / "one")
    model(inputs())
    load_checkpoint_and_dispatch(
        model,
        saved(other(), tmp_path / "weights"),
        device_map=device_map,
        max_memory={"cpu": 10**9} if device_map == "auto" else None,
        offload_folder=tmp_path / folder,
        strict=True,
    )
    assert torch.equal(model(inputs()), other()(inputs()))
    found, wanted = get_state_dict_offloaded_model(model), other().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert all(len(hooks_of(module)) <= 2 for module in model.modules())
