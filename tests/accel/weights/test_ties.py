"""E4: tied weights of a dispatched model stay one weight."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
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
from accel.hooks import (
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel.machine.errors import ConfigError, StateError
from accel.utils import set_module_tensor_to_device
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Block, Tied, inputs, net

TOKENS = torch.arange(6)
ACROSS = [{"": "cpu", "embedding": "disk"}, {"": "cpu", "head": "disk"}]


def made(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()


def empty() -> Tied:
    with init_empty_weights(include_buffers=False):
        return Tied().eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    Accelerator(cpu=True).save_model(made(), tmp_path / "weights")
    return tmp_path / "weights"


def plain_as(checkpoint: Path) -> Tied:
    """Return the model of the checkpoint; its shift is in no checkpoint."""
    model = made(1)
    load_checkpoint_in_model(model, checkpoint)
    return model


def loaded(checkpoint: Path, where: dict[str, str], folder: Path) -> nn.Module:
    model = load_checkpoint_and_dispatch(empty(), checkpoint, where, offload_folder=folder)
    model.get_submodule("block")._buffers["shift"] = made(1).get_buffer("block.shift")
    return model


@pytest.mark.parametrize("where", ACROSS)
def test_weights_that_are_loaded_to_disk_and_memory_are_tied(
    checkpoint: Path, where: dict[str, str], tmp_path: Path
) -> None:
    model, plain = loaded(checkpoint, where, tmp_path / "off"), plain_as(checkpoint)
    for one in (model, plain):
        name = "head.weight" if "embedding" in where else "embedding.weight"
        with torch.no_grad():
            one.get_parameter(name).mul_(2)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    remove_hook_from_submodules(model)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


@pytest.mark.parametrize("where", [{"": "cpu"}, *ACROSS])
def test_what_was_loaded_to_disk_alone_is_dispatched_tied(
    checkpoint: Path, where: dict[str, str], tmp_path: Path
) -> None:
    model = empty()
    load_checkpoint_in_model(model, checkpoint, {"": "disk"}, tmp_path / "off")
    dispatch_model(model, where, offload_dir=tmp_path / "off")
    remove_hook_from_submodules(model)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


def test_buffers_that_modules_share_are_loaded_as_one(tmp_path: Path) -> None:
    def sharing() -> nn.Sequential:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        model[1].running_mean = model[0].running_mean
        return model

    torch.save(sharing().state_dict(), tmp_path / "one.bin")
    with init_empty_weights():
        model = sharing()
    where = {"": "disk"}
    load_checkpoint_in_model(
        model, tmp_path / "one.bin", where, tmp_path / "off", offload_buffers=True
    )
    dispatch_model(model, {"": "cpu"}, offload_dir=tmp_path / "off")
    assert model[0].running_mean is model[1].running_mean


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_buffers_that_modules_share_have_the_statistics_of_both(
    offload: Callable[..., nn.Module], tmp_path: Path
) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain[3].running_mean = plain[1].running_mean
    model = copy.deepcopy(plain)
    given = (tmp_path,) if offload is disk_offload else ()
    offload(model, *given, execution_device="cpu", offload_buffers=True)
    with torch.no_grad():
        for _ in range(3):
            model(inputs()), plain(inputs())
    model.eval(), plain.eval()
    assert torch.equal(model(inputs()), plain(inputs()))
    remove_hook_from_submodules(model)
    assert model[3].running_mean is model[1].running_mean


@pytest.mark.parametrize("where", ACROSS)
def test_what_is_assigned_to_the_one_that_stays_is_its_alone(
    where: dict[str, str], tmp_path: Path
) -> None:
    plain = made()
    model = dispatch_model(copy.deepcopy(plain), where, offload_dir=tmp_path)
    name = "head" if "embedding" in where else "embedding"
    for one in (model, plain):
        with torch.no_grad():
            one.get_parameter(f"{name}.weight").mul_(3)  # of both, still
        one.get_submodule(name).weight = nn.Parameter(torch.ones(6, 4))
    assert torch.equal(model(TOKENS), plain(TOKENS))
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    remove_hook_from_submodules(model)
    assert torch.equal(model(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("where", ACROSS)
def test_functional_calls_cannot_replace_a_part_of_a_tie(
    where: dict[str, str], tmp_path: Path
) -> None:
    model = dispatch_model(made(), where, offload_dir=tmp_path)
    name = "head.weight" if "embedding" in where else "embedding.weight"
    with pytest.raises(StateError, match=r"replaced, as by functional_call, and is tied"):
        torch.func.functional_call(model, {name: torch.ones(6, 4)}, (TOKENS,))
    assert torch.equal(model(TOKENS), made()(TOKENS))


def test_what_is_assigned_to_one_that_was_given_back_is_its_alone(tmp_path: Path) -> None:
    plain = made()
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    remove_hook_from_module(model.get_submodule("embedding"))
    for one in (model, plain):
        one.get_submodule("embedding").weight = nn.Parameter(torch.ones(6, 4))
    assert torch.equal(model(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("where", ACROSS)
@pytest.mark.parametrize("lacks", [(), ("head.weight",)])
def test_a_state_dict_is_loaded_into_the_one_that_stays(
    where: dict[str, str], lacks: tuple[str, ...], tmp_path: Path
) -> None:
    plain = made()
    model = dispatch_model(copy.deepcopy(plain), where, offload_dir=tmp_path)
    # The other weights are equal: one that is offloaded alone cannot be written.
    state = plain.state_dict() | {"embedding.weight": torch.ones(6, 4)}
    state |= {"head.weight": torch.ones(6, 4)}
    for name in lacks:
        del state[name]
    for one in (model, plain):
        one.load_state_dict(state, strict=not lacks)
    assert torch.equal(model(TOKENS), plain(TOKENS))


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


Freeze = Callable[[nn.Module], object]
FREEZE: list[Freeze] = [
    lambda model: model.get_submodule("head").requires_grad_(False),
    lambda model: model.get_submodule("embedding").requires_grad_(False),
    lambda model: (
        model.requires_grad_(False),
        model.get_submodule("embedding").requires_grad_(True),
    ),
    lambda model: (model.requires_grad_(False), model.get_submodule("head").requires_grad_(True)),
    lambda model: setattr(model.get_parameter("head.weight"), "requires_grad", False),
]


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_a_part_that_is_tied_to_what_an_earlier_dispatch_has_is_refused(
    part: str, tmp_path: Path
) -> None:
    model = disk_offload(made(), tmp_path, "cpu")
    with pytest.raises(ConfigError, match="it is tied to a weight outside of what is"):
        cpu_offload(model.get_submodule(part), "cpu")
    assert torch.equal(model(TOKENS), made()(TOKENS))
    cpu_offload(model.get_submodule("block"), "cpu")
    assert torch.equal(model(TOKENS), made()(TOKENS))
    remove_hook_from_submodules(model)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    disk_offload(model, tmp_path / "again", "cpu")


@pytest.mark.parametrize("first", [{"": "disk"}, *ACROSS])
@pytest.mark.parametrize("is_removed", [True, False])
def test_what_was_untied_between_two_dispatches_is_no_longer_tied(
    first: dict[str, str], is_removed: bool, tmp_path: Path
) -> None:
    model = dispatch_model(made(), first, "cpu", offload_dir=tmp_path / "first")
    if is_removed:
        remove_hook_from_submodules(model)
    model.get_submodule("head").weight = nn.Parameter(torch.ones(6, 4))
    disk_offload(model, tmp_path / "second", "cpu")
    model.get_submodule("embedding").requires_grad_(False)
    assert model.get_parameter("head.weight").requires_grad


@pytest.mark.parametrize("where", ACROSS)
def test_a_value_that_is_assigned_to_one_name_is_not_that_of_others(
    where: dict[str, str], tmp_path: Path
) -> None:
    plain = made()
    model = dispatch_model(copy.deepcopy(plain), where, offload_dir=tmp_path)
    name = "embedding.weight" if "embedding" in where else "head.weight"
    with pytest.raises(RuntimeError, match="offloaded weights cannot be loaded"):
        model.load_state_dict({name: torch.ones(6, 4)}, strict=False, assign=True)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_values_that_are_assigned_by_a_state_dict_are_no_ones_else(tmp_path: Path) -> None:
    """A plain model unties them; of two names that are offloaded one value would be lost."""
    plain = made()
    plain.head.register_parameter("other", plain.head.weight)
    model = dispatch_model(copy.deepcopy(plain), {"": "cpu", "head": "disk"}, offload_dir=tmp_path)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    state["head.other"] += 1
    with pytest.raises(RuntimeError, match=r"head\.other: offloaded weights cannot be loaded"):
        model.load_state_dict(state, assign=True)


# -- removal -------------------------------------------------------------------------------


def test_a_model_with_a_list_of_modules_is_pickled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[1].layers = nn.ModuleList([nn.Linear(4, 4)])
    plain = copy.deepcopy(model)
    dispatch_model(model, {"": "cpu", "2": "disk"}, offload_dir=tmp_path)
    assert torch.equal(pickle.loads(pickle.dumps(model))(inputs()), plain(inputs()))


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


def test_an_optimizer_without_what_an_offloaded_weight_is_tied_to_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dispatch_model(made(), {"": "cpu", "head": "disk"}, "cpu", offload_dir=tmp_path)
    head, block = (list(model.get_submodule(one).parameters()) for one in ("head", "block"))
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="1 offloaded weights that are to train"):
        accelerator.prepare(torch.optim.SGD(head, lr=0.1))
    accelerator.prepare(torch.optim.SGD([*head, *block], lr=0.1))
    assert "1 offloaded weights of an optimizer do not train" in caplog.text
    caplog.clear()
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not caplog.text


NAMES = ["embedding.weight", "head.weight"]
MAPS: list[dict[str, Any] | None] = [
    None,
    {"": "cpu"},
    {"": "disk"},
    {"embedding": "disk", "block": "cpu", "head": "disk"},
    {"embedding": "disk", "": "cpu"},
    {"head": "disk", "": "cpu"},
]


def seeded(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()


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
    source, model = seeded(0), seeded(1)
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


def test_what_is_offloaded_stays_tied(tmp_path: Path) -> None:
    model = seeded(1)
    load_checkpoint_and_dispatch(
        model,
        save(seeded(0), NAMES[0], tmp_path / "weights", "safetensors"),
        device_map={"": "disk"},
        offload_folder=tmp_path / "off",
    )
    assert not list((tmp_path / "off").glob("*weight.dat"))  # all names read the checkpoint
    with pytest.raises(StateError, match="tied to others"):
        set_module_tensor_to_device(model, NAMES[1], "cpu", value=torch.ones(6, 4))


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "disk"},
        {"0": "disk", "1": "cpu", "2": "disk"},
        {"0": "disk", "1": "cpu", "2": "disk", "2.norm.running_mean": "cpu"},
    ],
)
def test_a_module_may_be_in_several_places(device_map: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = Block()
    source = nn.Sequential(block, Block(), block).eval()
    source[0].norm.running_mean.fill_(1)
    Accelerator(cpu=True).save_model(source, tmp_path / "weights")
    model = copy.deepcopy(source)
    for value in model.state_dict().values():
        value.zero_()
    load_checkpoint_and_dispatch(
        model, tmp_path / "weights", device_map, offload_folder=tmp_path / "off", strict=True
    )
    assert torch.equal(model(inputs()), source(inputs()))


SIX_TOKENS = torch.arange(6)
TIED_MAPS = [
    {"": "cpu"},
    {"": "disk"},
    {"": "cpu", "embedding": "disk"},
    {"": "cpu", "head": "disk"},
]


def made_tied() -> Tied:
    torch.manual_seed(0)
    model = Tied().eval()
    model.head.bias = nn.Parameter(torch.ones(6))
    return model


def empty_tied() -> Tied:
    with init_empty_weights(include_buffers=False):
        return made_tied()


def shifted(model: nn.Module) -> nn.Module:
    """Give a model the buffer that is in no checkpoint."""
    kept = model.get_parameter("head.weight").dtype
    model.get_submodule("block")._buffers["shift"] = made_tied().get_buffer("block.shift").to(kept)
    return model


@pytest.mark.parametrize("where", TIED_MAPS)
@pytest.mark.parametrize("build", [empty_tied, made_tied])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_of_a_tied_weight_with_two_values_the_last_is_loaded(
    where: dict[str, str], build: Callable[[], Tied], form: str, tmp_path: Path
) -> None:
    plain = made_tied()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    state["head.weight"] += 1
    plain.load_state_dict(state)
    save = safetensors.torch.save_file if form == "safetensors" else torch.save
    save(state, tmp_path / f"model.{form}")
    model = load_checkpoint_and_dispatch(
        build(), tmp_path / f"model.{form}", where, offload_folder=tmp_path / "off"
    )
    shifted(model)
    for _ in range(2):
        assert torch.equal(model(SIX_TOKENS), plain(SIX_TOKENS))
        remove_hook_from_submodules(model)


@pytest.mark.parametrize("where", TIED_MAPS)
@pytest.mark.parametrize("kept", ["head", "embedding"])
def test_a_tied_weight_stays_in_fp32_under_all_its_names(
    where: dict[str, str], kept: str, tmp_path: Path
) -> None:
    Accelerator(cpu=True).save_model(made_tied(), tmp_path / "weights")
    model = empty_tied()
    folder, dtype = tmp_path / "off", torch.bfloat16
    load_checkpoint_in_model(
        model, tmp_path / "weights", where, folder, dtype, keep_in_fp32_modules=[kept]
    )
    shifted(model)
    dispatch_model(model, where, "cpu", offload_dir=folder)
    assert torch.allclose(
        model(SIX_TOKENS).float(),
        made_tied()(SIX_TOKENS),
        rtol=0.05,
        atol=0.05,
    )
    remove_hook_from_submodules(model)
    weight = model.get_parameter("head.weight")
    assert weight is model.get_parameter("embedding.weight")
    assert weight.dtype == torch.float32


@pytest.mark.parametrize("where", TIED_MAPS[2:])
@pytest.mark.parametrize("names", [("head", "embedding"), ("head",), ("embedding",)])
def test_a_checkpoint_is_loaded_into_the_one_that_stays(
    where: dict[str, str], names: tuple[str, ...], tmp_path: Path
) -> None:
    plain = made_tied()
    state = {n: v + (n != "head.bias") for n, v in plain.state_dict().items()}
    plain.load_state_dict(state)
    tied = ("head.weight", "embedding.weight")
    stored = {n: v for n, v in state.items() if n not in tied or n.partition(".")[0] in names}
    torch.save(stored, tmp_path / "model.pt")
    model = dispatch_model(made_tied(), where, "cpu", offload_dir=tmp_path / "off")
    load_checkpoint_in_model(model, tmp_path / "model.pt")
    for _ in range(2):
        assert torch.equal(model(SIX_TOKENS), plain(SIX_TOKENS))
        remove_hook_from_submodules(model)


FEW_TOKENS = torch.arange(6)
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
            assert torch.equal(model(FEW_TOKENS), plain(FEW_TOKENS))
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
        one(FEW_TOKENS).square().sum().backward()
    assert resident.grad is not None
    assert torch.equal(resident.grad, plain.get_parameter("head.weight").grad)


def test_a_copy_has_its_own(tmp_path: Path) -> None:
    plain, model, resident = tied(RESIDENT[0], tmp_path)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        resident.zero_()
        assert torch.equal(copied(FEW_TOKENS), plain(FEW_TOKENS))
        copied.get_parameter("embedding.weight").mul_(2)
        plain.get_parameter("head.weight").mul_(2)
        assert torch.equal(copied(FEW_TOKENS), plain(FEW_TOKENS))
