"""E1, E4: a dispatched model computes what it computes in memory; the last dispatch holds."""

from __future__ import annotations

import copy
import json
import logging
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
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel.machine.errors import CheckpointError, ConfigError, StateError
from accel.utils import OffloadedWeightsLoader, offload_state_dict, set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from accel.weights import read_ahead
from accel.weights.hooks import hooks_of
from tests.accel.weights.models import (
    TO_DISK,
    Block,
    Direct,
    Dispatch,
    Tied,
    hook_of,
    inputs,
    net,
    on_meta,
)

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


def test_a_model_with_weights_of_its_own_has_one_hook(tmp_path: Path) -> None:
    """transformers reads them from `model._hf_hook.weights_map`, as to save the model."""
    for model in (
        cpu_offload(Block().eval(), "cpu"),
        disk_offload(Block().eval(), tmp_path, "cpu"),
        dispatch_model(Block().eval(), {"": "disk"}, offload_dir=tmp_path / "map"),
    ):
        hook = hook_of(model)
        assert hook.io_same_device
        assert hook.weights_map is not None
        expected = model(inputs())
        scale = hook.weights_map["scale"]
        remove_hook_from_submodules(model)
        assert torch.equal(scale, model.get_parameter("scale"))
        assert torch.equal(expected, model(inputs()))


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


def test_everything_may_be_on_disk(tmp_path: Path) -> None:
    model = dispatch_model(net(), {"": "disk"}, "cpu", offload_dir=tmp_path)
    assert on_meta(model) == PARAMETERS
    assert torch.equal(model(inputs()), net()(inputs()))


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


def test_weights_without_data_come_from_the_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {n: v for n, v in zeros().items() if n.startswith("1.")})
    model = net()
    for name in ("scale", "linear", "norm"):
        part = model[1].get_parameter(name) if name == "scale" else getattr(model[1], name)
        setattr(
            model[1], name, nn.Parameter(part.to("meta")) if name == "scale" else part.to("meta")
        )
    with pytest.raises(ConfigError, match=r"weights 1\.scale, .*: they have no values"):
        dispatch_model(model, HALF, offload_dir=tmp_path / "empty")
    dispatch_model(model, HALF, offload_dir=tmp_path, offload_buffers=True)
    assert torch.equal(model(inputs()), shift())
    back = dispatch_model(model_on_meta(), {"": "cpu"}, offload_dir=tmp_path)
    assert on_meta(back) == set()


def model_on_meta() -> nn.Module:
    """Return `net` whose second block was offloaded to a folder by another program."""
    model = net()
    for name in ("1.linear.weight", "1.linear.bias"):
        owner = model[1].linear
        key = name.rpartition(".")[2]
        setattr(owner, key, nn.Parameter(getattr(owner, key).to("meta")))
    return model


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


def test_tied_weights_survive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = torch.tensor([[1, 2]]).reshape(2)
    for device_map in (
        {"embedding": "cpu", "block": "disk", "head": "cpu"},
        {"embedding": "disk", "block": "cpu", "head": "disk"},
        {"embedding": "cpu", "block": "cpu", "head": "disk"},
    ):
        torch.manual_seed(0)
        model = Tied().eval()
        expected = model(tokens)
        dispatch_model(model, device_map, offload_dir=tmp_path / str(device_map["block"]))
        assert torch.equal(model(tokens), expected)
        if device_map["head"] == device_map["embedding"] == "cpu":
            assert model.head.weight is model.embedding.weight
    assert "Tied parameters are on different devices" in caplog.text


def test_a_dispatched_model_is_not_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = dispatch_model(net(), HALF, offload_dir=tmp_path)
    with pytest.raises(StateError, match="You can't move a model"):
        model.to("cpu")
    hooked = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    with caplog.at_level(logging.WARNING):
        assert hooked.to("cpu") is hooked
    assert "You shouldn't move a model" in caplog.text


def test_adapters_train_over_a_frozen_base(tmp_path: Path) -> None:
    losses = []
    for offloads in (True, False):
        model = net()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("scale" in name)
        if offloads:
            dispatch_model(model, {"": "disk"}, "cpu", offload_dir=tmp_path)
            assert on_meta(model) == {name for name in PARAMETERS if "scale" not in name}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(3):
            loss = model(inputs()).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert losses[2] < losses[0]


def test_weights_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 1)
    model = disk_offload(net(), tmp_path, "cpu")
    for _ in range(2):
        assert torch.equal(model(inputs()), net()(inputs()))
    ahead = hook_of(model[0].linear).read_ahead
    assert ahead is not None
    assert ahead[0] is hook_of(model[1].norm).read_ahead[0]


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


@pytest.mark.slow
def test_a_dispatched_model_is_compiled(tmp_path: Path) -> None:
    model = dispatch_model(net(), HALF, offload_dir=tmp_path)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(inputs()), net()(inputs()))


def test_a_folder_that_another_model_takes_is_not_mixed_in(tmp_path: Path) -> None:
    first = dispatch_model(net(), HALF, offload_dir=tmp_path)
    equal = dispatch_model(net(), HALF, offload_dir=tmp_path)
    for model in (first, equal):
        assert torch.equal(model(inputs()), net()(inputs()))
    other = net()
    with torch.no_grad():
        other[1].scale.mul_(2)
    dispatch_model(other, HALF, offload_dir=tmp_path)
    with pytest.raises(CheckpointError, match="was written or removed since the model was"):
        first(inputs())


def test_weights_that_are_offloaded_are_not_loaded_into(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    plain = accelerator.prepare_model(net())
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    model = accelerator.prepare_model(dispatch_model(net(), HALF, offload_dir=tmp_path / "off"))
    rule = "1.scale: offloaded weights cannot be loaded into a dispatched model"
    with pytest.raises(RuntimeError, match=rule):
        model.load_state_dict({**plain.state_dict(), "1.scale": torch.zeros(4)})
    model.load_state_dict(plain.state_dict())
    accelerator.load_state(tmp_path / "state")
    resident = {name: value for name, value in net().state_dict().items() if name[0] == "0"}
    assert not model.load_state_dict(resident, strict=False).unexpected_keys
    remove_hook_from_submodules(model)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(inputs()), net()(inputs()))


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "disk"},
        {"block": "cpu", "": "disk"},
        {"": "cpu", "head": "disk"},
        {"": "cpu", "embedding": "disk"},
        None,
    ],
)
def test_ties_are_there_again_without_the_hooks(
    device_map: dict[str, Any] | None, tmp_path: Path
) -> None:
    model, tokens = Tied().eval(), torch.tensor([1, 2])
    expected = model(tokens)
    if device_map is None:
        cpu_offload(model, "cpu")
    else:
        dispatch_model(model, device_map, offload_dir=tmp_path, force_hooks=True)
    for _ in range(2):
        assert torch.equal(model(tokens), expected)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(tokens), expected)
    disk_offload(model, tmp_path / "again", "cpu")
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embedding.weight


def test_a_dispatched_model_is_pickled_with_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 1)
    Accelerator(cpu=True).save_model(net(), tmp_path / "weights")
    with init_empty_weights():
        model = net()
    model = load_checkpoint_and_dispatch(
        model, tmp_path / "weights", device_map=HALF, offload_folder=tmp_path / "off"
    )
    model(inputs())
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(inputs()), model(inputs()))


def test_a_dispatched_model_is_not_exported(tmp_path: Path) -> None:
    model = dispatch_model(net(), HALF, offload_dir=tmp_path)
    with pytest.raises(StateError, match=r"hooks move inputs .*remove_hook_from_submodules"):
        torch.export.export(model, (inputs(),))
    remove_hook_from_submodules(model)
    exported = torch.export.export(model, (inputs(),))
    assert torch.equal(exported.module()(inputs()), net()(inputs()))


MAPS: list[dict[str, Any]] = [
    {"0": "disk", "1": "cpu"},
    {"": "cpu"},
    {"": "disk"},
    {"0": "cpu", "1": "disk"},
    {"0.norm": "disk", "": "cpu"},
]


def hooks(model: nn.Module) -> list[int]:
    return [len(hooks_of(module)) for module in model.modules()]


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("second", MAPS)
def test_the_last_map_holds(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    once = dispatch_model(net(), second, offload_dir=tmp_path / "once")
    model = dispatch_model(net(), first, offload_dir=tmp_path / "one")
    model(inputs())
    for folder in ("one", "other", "other"):
        dispatch_model(model, second, offload_dir=tmp_path / folder)
        assert model.hf_device_map == second
        for _ in range(2):
            assert torch.equal(model(inputs()), net()(inputs()))
        assert on_meta(model) == on_meta(once)
        assert hooks(model) == hooks(once)
    if second == {"": "cpu"}:
        model.load_state_dict(net().state_dict())
        assert "to" not in vars(model)


@pytest.mark.parametrize("second", MAPS)
def test_weights_that_were_never_in_memory_are_found(
    second: dict[str, Any], tmp_path: Path
) -> None:
    Accelerator(cpu=True).save_model(net(), tmp_path / "weights")
    with init_empty_weights():
        model = net()
    load_checkpoint_and_dispatch(
        model, tmp_path / "weights", device_map=MAPS[0], offload_folder=tmp_path / "off"
    )
    expected = model(inputs())
    dispatch_model(model, second, offload_dir=tmp_path / "again")
    assert torch.equal(model(inputs()), expected)


@pytest.mark.parametrize(
    "second", [{"": "cpu"}, {"": "disk"}, {"block": "disk", "": "cpu"}, {"head": "disk", "": "cpu"}]
)
def test_ties_survive(second: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = Tied().eval(), torch.tensor([1, 2])
    expected = copy.deepcopy(model)(tokens)
    dispatch_model(model, {"block": "cpu", "": "disk"}, offload_dir=tmp_path)
    dispatch_model(model, second, offload_dir=tmp_path)
    assert torch.equal(model(tokens), expected)
    dispatch_model(model, {"": "cpu"})
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(tokens), expected)


def test_offloading_again_undoes_the_first(tmp_path: Path) -> None:
    once = hooks(cpu_offload(net(), "cpu"))
    model = disk_offload(net(), tmp_path / "one", "cpu")
    for _ in range(2):
        cpu_offload(model, "cpu")
        assert hooks(model) == once
        assert torch.equal(model(inputs()), net()(inputs()))
        disk_offload(model, tmp_path / "two", "cpu")
        assert hooks(model) == once
        assert torch.equal(model(inputs()), net()(inputs()))


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


def test_what_was_written_in_between_is_kept(tmp_path: Path) -> None:
    model, expected = disk_offload(net(), tmp_path, "cpu"), net()
    set_module_tensor_to_device(model, "1.linear.bias", "cpu", value=torch.ones(4))
    expected[1].linear.bias.data.fill_(1)
    disk_offload(model, tmp_path, "cpu")
    assert torch.equal(model(inputs()), expected(inputs()))


def from_disk(model: nn.Module, folder: Path, **options: Any) -> nn.Module:
    """Dispatch a model to disk that never had its weights in memory; `model` has their values."""
    Accelerator(cpu=True).save_model(model, folder / "weights")
    with init_empty_weights():
        empty = copy.deepcopy(model).to("meta")
    return load_checkpoint_and_dispatch(
        empty, folder / "weights", {"": "disk"}, offload_folder=folder / "off", **options
    )


class Writes(nn.Embedding):
    """An embedding whose forward pass changes its weight, as that of `max_norm` does."""

    def __init__(self) -> None:
        super().__init__(3, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.data = self.weight.data / 2
        return super().forward(tokens)


def zeroed(model: nn.Module) -> None:
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.zeros(4, 4))


def trained(model: nn.Module) -> None:
    model.train()(torch.tensor([0, 2]))
    model.eval()


@pytest.mark.parametrize(
    ("layers", "edit", "x"),
    [
        ([nn.Linear(4, 4), nn.Linear(4, 4)], zeroed, inputs()),
        ([nn.Embedding(3, 4), nn.BatchNorm1d(4)], trained, torch.tensor([0, 1])),
        ([Writes()], trained, torch.tensor([0, 1])),
    ],
)
@pytest.mark.parametrize("second", [{"": "cpu"}, {"": "disk"}])
def test_what_lies_in_memory_alone_is_kept_where_hooks_are_removed(
    layers: list[nn.Module],
    edit: Callable[[nn.Module], None],
    x: torch.Tensor,
    second: dict[str, Any],
    tmp_path: Path,
) -> None:
    model = from_disk(nn.Sequential(*layers).eval(), tmp_path, offload_buffers=True)
    before = model(x).detach()
    edit(model)
    expected = model(x).detach()
    assert not torch.allclose(before, expected)
    remove_hook_from_submodules(model)
    dispatch_model(model, second, offload_dir=tmp_path / "off")
    assert torch.allclose(model(x), expected)  # the address of a weight decides the kernel


DISPATCHES: list[Dispatch] = [
    *TO_DISK,
    lambda model, folder: cpu_offload(model, "cpu"),
    lambda model, folder: dispatch_model(
        model, {"0": "cpu", "1": "disk"}, offload_dir=folder, offload_buffers=True
    ),
]
LOADED_MAPS: list[Any] = [{"": "disk"}, {"": "cpu"}, {"0": "disk", "1": "cpu"}, "auto"]


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


def test_in_two_calls(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    weights = saved(other(), tmp_path / "weights")
    off = tmp_path / "off"
    load_checkpoint_in_model(model, weights, {"": "disk"}, offload_folder=off)
    assert not any(hooks_of(module) for module in model.modules())
    dispatch_model(model, {"": "disk"}, offload_dir=off)
    assert torch.equal(model(inputs()), other()(inputs()))


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}])
@pytest.mark.parametrize("first", [{"": "disk"}, {"head": "disk", "": "cpu"}])
def test_ties_are_known(first: dict[str, Any], device_map: dict[str, Any], tmp_path: Path) -> None:
    source, model = Tied().eval(), Tied().eval()
    model.block.shift.copy_(source.block.shift)
    weights = saved(source, tmp_path / "weights")  # one of the names
    dispatch_model(model, first, offload_dir=tmp_path / "one")
    load_checkpoint_and_dispatch(
        model, weights, device_map=device_map, offload_folder=tmp_path / "off", strict=True
    )
    tokens = torch.tensor([1, 2])
    assert torch.equal(model(tokens), source(tokens))
    found = get_state_dict_offloaded_model(model)
    assert torch.equal(found["head.weight"], found["embedding.weight"])


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}])
def test_files_of_the_old_weights_may_be_gone(device_map: dict[str, Any], tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    for file in (tmp_path / "one").iterdir():
        file.unlink()
    weights = saved(other(), tmp_path / "weights")
    load_checkpoint_and_dispatch(
        model, weights, device_map=device_map, offload_folder=tmp_path / "off", strict=True
    )
    assert torch.equal(model(inputs()), other()(inputs()))


def test_weights_of_others_stay_as_they_are(tmp_path: Path) -> None:
    mine = {name: value.clone() for name, value in net().state_dict().items()}
    model = cpu_offload(net(), "cpu", state_dict=mine)
    weights = saved(other(), tmp_path / "weights")
    load_checkpoint_and_dispatch(model, weights, device_map={"": "cpu"}, strict=True)
    assert torch.equal(model(inputs()), other()(inputs()))
    assert all(torch.equal(mine[name], value) for name, value in net().state_dict().items())


@pytest.mark.filterwarnings("ignore:load_checkpoint_in_model")
def test_what_the_checkpoint_lacks_is_kept(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    save_file({"0.scale": torch.ones(4)}, tmp_path / "some.safetensors")
    load_checkpoint_and_dispatch(
        model, tmp_path / "some.safetensors", {"": "disk"}, offload_folder=tmp_path / "off"
    )
    expected = net()
    expected[0].scale.data.fill_(1)
    assert torch.equal(model(inputs()), expected(inputs()))
    assert "0.scale" in json.loads((tmp_path / "off" / "index.json").read_text())


def test_what_is_refused_leaves_the_model_dispatched(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "one", "cpu")
    before = model._hf_hook
    save_file({"0.scale": torch.ones(5)}, tmp_path / "wrong.safetensors")
    with pytest.raises(CheckpointError, match="wrong shapes"):
        load_checkpoint_and_dispatch(model, tmp_path / "wrong.safetensors", {"": "cpu"})
    with pytest.raises(ConfigError, match="device_map='automatic'"):
        load_checkpoint_and_dispatch(model, tmp_path / "wrong.safetensors", "automatic")
    assert model._hf_hook is before
    assert torch.equal(model(inputs()), net()(inputs()))


def test_hooks_of_others_stay_where_weights_are_loaded(tmp_path: Path) -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    model = disk_offload(net(), tmp_path / "one", "cpu")
    add_hook_to_module(model[1], Doubling(), append=True)
    weights = saved(other(), tmp_path / "weights")
    load_checkpoint_and_dispatch(model, weights, {"": "disk"}, offload_folder=tmp_path / "off")
    assert torch.equal(model(inputs()), other()(inputs()) * 2)
