"""Checkpoints loaded into models that are larger than a device."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    cpu_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel.checkpoint.export import export_model
from accel.hooks import remove_hook_from_submodules
from accel.machine.errors import CheckpointError, ConfigError, StateError
from accel.utils import load_state_dict, set_module_tensor_to_device
from tests.accel.weights.models import Direct, Tied, hook_of, inputs, on_meta

BIG = {"cpu": 10**9}


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def fresh() -> nn.Sequential:
    with init_empty_weights():
        return plain()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_model(plain().state_dict(), tmp_path / "weights", max_shard_size=100)
    return tmp_path / "weights"


def load(folder: Path, model: nn.Module | None = None, **options: Any) -> nn.Module:
    return load_checkpoint_and_dispatch(fresh() if model is None else model, folder, **options)


HALF = {"0": "cpu", "1": "cpu", "2": "disk"}


def test_a_checkpoint_is_loaded_and_spread(folder: Path, tmp_path: Path) -> None:
    model = load(folder, device_map=HALF, offload_folder=tmp_path / "off")
    assert on_meta(model) == {"2.weight", "2.bias"}
    assert list((tmp_path / "off").iterdir()) == [tmp_path / "off" / "index.json"]
    assert torch.equal(model(inputs()), plain()(inputs()))
    assert model.hf_device_map == HALF


def test_without_a_map_weights_are_loaded_alone(folder: Path) -> None:
    model = load(folder)
    assert on_meta(model) == set()
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(inputs()), plain()(inputs()))


@pytest.mark.parametrize("word", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_may_be_inferred(folder: Path, word: str) -> None:
    model = load(folder, device_map=word, max_memory=BIG)
    assert model.hf_device_map == {"": "cpu"}
    with pytest.raises(ConfigError, match="'aut'"):
        load(folder, device_map="aut")


def test_memory_classes_and_dtype_decide(folder: Path, tmp_path: Path) -> None:
    room: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": 160}}
    room["offload_folder"] = tmp_path / "off"
    assert load(folder, **room).hf_device_map == {"0": "cpu", "1": "disk", "2": "disk"}
    model = nn.Sequential(fresh())
    export_model(nn.Sequential(plain()).state_dict(), tmp_path / "nested")
    found = load(tmp_path / "nested", model, no_split_module_classes=["Sequential"], **room)
    assert found.hf_device_map == {"0": "disk"}
    half = load(folder, dtype="float16", **room)
    assert half[0].weight.dtype == torch.float16
    assert half.hf_device_map == {"": "cpu"}


def test_buffers_are_offloaded_on_request(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device_map": {"0": "cpu", "1": "disk", "2": "disk"}}
    options["offload_folder"] = tmp_path / "off"
    assert "1.running_mean" not in on_meta(load(folder, **options))
    model = load(folder, offload_buffers=True, **options)
    assert "1.running_mean" in on_meta(model)
    assert torch.equal(model(inputs()), plain()(inputs()))


def test_legacy_files_may_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(plain().state_dict(), tmp_path, safe=False)
    mapped: list[bool] = []
    original = torch.load

    def spy(path: Any, **kwargs: Any) -> Any:
        mapped.append(kwargs["mmap"])
        return original(path, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    load(tmp_path, device_map=HALF, offload_folder=tmp_path / "off")
    assert mapped == [False, True]
    load(tmp_path, device_map=HALF, offload_folder=tmp_path / "off", offload_state_dict=False)
    assert mapped[2:] == [False, False]


def test_hooks_have_the_options(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device_map": {"": "cpu"}}
    assert not hasattr(load(folder, **options), "_hf_hook")
    model = load(folder, force_hooks=True, skip_keys="x", **options)
    assert hook_of(model).skip_keys == "x"
    direct = Direct()
    export_model(direct.state_dict(), tmp_path / "direct")
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "off"}
    model = load(tmp_path / "direct", Direct(), preload_module_classes=["Direct"], **options)
    assert torch.equal(model(inputs()), direct(inputs()))


def test_names_must_match_if_strict(folder: Path) -> None:
    other = plain().append(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="missing from the checkpoint"):
        load(folder, other)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: 3\.weight"):
        load(folder, other, strict=True)


def test_options_of_several_processes_are_handed_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel.weights import load as module

    given: dict[str, object] = {}
    monkeypatch.setattr(
        module, "load_checkpoint_in_model", lambda *_, **kwargs: given.update(kwargs)
    )
    load(folder, full_state_dict=False, broadcast_from_rank0=True)
    assert (given["full_state_dict"], given["broadcast_from_rank0"]) == (False, True)


def test_tied_weights_are_loaded_once(tmp_path: Path) -> None:
    model = Tied().eval()
    export_model(model.state_dict(), tmp_path / "tied")
    tokens = torch.tensor([3, 1])
    for where in ({"": "cpu"}, {"embedding": "disk", "block": "cpu", "head": "disk"}):
        with init_empty_weights():
            other = Tied().eval()
        load(tmp_path / "tied", other, device_map=where, offload_folder=tmp_path / "off")
        other.block.shift = model.block.shift
        assert torch.equal(other(tokens), model(tokens))


# -- one file ------------------------------------------------------------------------------


def test_one_file_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = plain()
    with caplog.at_level(logging.WARNING):
        for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
            export_model(model.state_dict(), tmp_path, safe=safe)
            found = load_state_dict(tmp_path / name)
            assert all(torch.equal(found[n], v) for n, v in model.state_dict().items())
    assert caplog.text == ""


def test_weights_of_a_file_are_placed(tmp_path: Path) -> None:
    export_model(plain().state_dict(), tmp_path)
    found = load_state_dict(tmp_path / "model.safetensors", {"0": "meta", "1": "disk"})
    assert found["0.weight"].is_meta
    assert not found["1.weight"].is_meta
    assert not found["2.weight"].is_meta


def doubled() -> nn.Sequential:
    model = plain()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def test_a_checkpoint_that_is_written_again_is_not_mixed_in(folder: Path, tmp_path: Path) -> None:
    model = load(folder, device_map=HALF, offload_folder=tmp_path / "off")
    export_model(doubled().state_dict(), folder, max_shard_size=100)
    with pytest.raises(CheckpointError, match="was written or removed since the model was"):
        model(inputs())


@pytest.mark.filterwarnings("ignore:load_checkpoint_in_model")
def test_a_used_folder_fills_in_no_weight_of_another_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    load(folder, device_map=HALF, offload_folder=tmp_path / "off")
    state = doubled().state_dict()
    del state["2.bias"]
    export_model(state, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"weights 2\.bias: they have no values"):
        load(tmp_path / "other", device_map=HALF, offload_folder=tmp_path / "off")


@pytest.mark.parametrize(
    "device_map",
    [{"": "disk"}, {"": "cpu"}, {"2": "cpu", "": "disk"}, {"0": "disk", "": "cpu"}],
)
@pytest.mark.filterwarnings("ignore:load_checkpoint_in_model")
def test_weights_that_nothing_has_values_for_are_told(
    device_map: dict[str, Any], tmp_path: Path
) -> None:
    state = plain().state_dict()
    value = state.pop("2.bias")
    export_model(state, tmp_path / "short")
    options: dict[str, Any] = {"device_map": device_map, "offload_folder": tmp_path / "off"}
    rule = r"weights 2\.bias: they have no values.* Load a checkpoint that has them .* or give them"
    with pytest.raises(ConfigError, match=rule):
        load(tmp_path / "short", **options)
    model = fresh()
    set_module_tensor_to_device(model, "2.bias", "cpu", value)  # the remedy
    model = load_checkpoint_and_dispatch(model, tmp_path / "short", **options)
    assert torch.equal(model(inputs()), plain()(inputs()))


def test_a_model_without_values_is_not_offloaded() -> None:
    model = fresh()
    with pytest.raises(ConfigError, match=r"weights 0\.weight, .*: they have no values"):
        cpu_offload(model, "cpu")
    state = plain().state_dict()
    with pytest.raises(ConfigError, match=r"weights 2\.bias: they have no values"):
        cpu_offload(model, "cpu", state_dict={n: v for n, v in state.items() if n != "2.bias"})
    assert torch.equal(cpu_offload(model, "cpu", state_dict=state)(inputs()), plain()(inputs()))


def test_what_is_on_disk_is_saved_without_hooks_alone(folder: Path, tmp_path: Path) -> None:
    model = load(folder, device_map=HALF, offload_folder=tmp_path / "off")
    assert on_meta(model) == {"2.weight", "2.bias"}
    with pytest.raises(StateError, match=r"offloaded weight .* without their values"):
        torch.save(model.state_dict(), tmp_path / "lost.pt")
    with pytest.raises(StateError, match=r"Remove its hooks with accel.hooks.remove_hook_from_sub"):
        model.cpu()
    remove_hook_from_submodules(model)  # the remedy
    assert on_meta(model) == set()
    assert model.cpu() is model
    torch.save(model.state_dict(), tmp_path / "full.pt")
    assert torch.equal(model(inputs()), plain()(inputs()))


def test_hooks_may_be_removed_and_attached_again(folder: Path, tmp_path: Path) -> None:
    model = load(folder, device_map=HALF, offload_folder=tmp_path / "off")
    for _ in range(2):
        remove_hook_from_submodules(model)
        dispatch_model(model, HALF, offload_dir=tmp_path / "off")
        assert torch.equal(model(inputs()), plain()(inputs()))
    remove_hook_from_submodules(model)
    assert {type(weight) for weight in model.parameters()} == {nn.Parameter}
    assert torch.equal(model(inputs()), plain()(inputs()))


def test_an_inferred_map_may_name_a_buffer_that_no_checkpoint_has(tmp_path: Path) -> None:
    model = Tied().eval()
    export_model(model.state_dict(), tmp_path / "weights")
    loaded = copy.deepcopy(model)
    nn.init.zeros_(loaded.block.linear.weight)
    device_map = infer_auto_device_map(loaded, {"cpu": 200})
    assert device_map["block.shift"] == "disk"
    load(tmp_path / "weights", loaded, device_map=device_map, offload_folder=tmp_path / "off")
    tokens = torch.tensor([1, 2])
    assert torch.equal(loaded(tokens), model(tokens))
