"""E1, E4: a checkpoint is loaded into a model, in memory or over devices."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    cpu_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.checkpoint import serialization
from accel.checkpoint.export import export_model
from accel.machine.errors import CheckpointError, ConfigError
from accel.utils import OffloadedWeightsLoader, load_state_dict, set_module_tensor_to_device
from tests.accel.weights.models import Direct, hook_of, inputs, on_meta
from tests.benchmarks import bench_large

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


@pytest.mark.parametrize(
    "device_map", [{"": "disk"}, {"": "cpu"}, {"2": "cpu", "": "disk"}, {"0": "disk", "": "cpu"}]
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


LAYOUTS = {
    "file": ("model.safetensors", {}),
    "folder": ("", {}),
    "shards": ("", {"max_shard_size": 60}),
    "index": ("model.safetensors.index.json", {"max_shard_size": 60}),
    "legacy file": ("pytorch_model.bin", {"safe": False}),
    "legacy folder": ("", {"safe": False}),
    "legacy shards": ("", {"safe": False, "max_shard_size": 60}),
    "legacy index": ("pytorch_model.bin.index.json", {"safe": False, "max_shard_size": 60}),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class TiedNet(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, **kwargs)
        self.head = nn.Linear(3, 5, bias=False, **kwargs)
        self.head.weight = self.embedding.weight


def saved(folder: Path, **kwargs: Any) -> nn.Sequential:
    """Return a model whose weights lie in `folder`."""
    model = net()
    nn.init.normal_(model[1].running_mean)
    export_model(model.state_dict(), folder, **kwargs)
    return model


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    """Return whether two models have the same weights, bit for bit."""
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    return all(a == b and torch.equal(v, w) for (a, v), (b, w) in pairs)


def fails(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the message of the one error that a call ends in."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# -- where weights lie ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_layout_loads_strictly(tmp_path: Path, layout: str, device: str) -> None:
    name, options = LAYOUTS[layout]
    model = saved(tmp_path, **options)
    fresh = net().to(device)
    load_checkpoint_in_model(fresh, tmp_path / name, strict=True)
    assert same(fresh, model)
    assert all(parameter.requires_grad for parameter in fresh.parameters())


# -- what fits -----------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size=60)
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    other.append(nn.Linear(1, 1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for strict in (True, False):
        message = fails(load_checkpoint_in_model, other, tmp_path, strict=strict)
        assert "0.weight is [4, 3], in the model [5, 3], 0.bias is [4], in the model [5]" in message
        assert "missing from the checkpoint: 3.weight, 3.bias" in message
        assert "not in the model: 2.bias" in message
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_names_must_match_if_strict_in_memory(tmp_path: Path) -> None:
    model = saved(tmp_path)
    other = net().append(nn.Linear(1, 1))
    other[2].bias = None
    message = fails(load_checkpoint_in_model, other, tmp_path, strict=True)
    assert "missing from the checkpoint: 3.weight, 3.bias; not in the model: 2.bias" in message
    with pytest.warns(UserWarning, match="not in the model: 2.bias"):
        load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_checkpoint_of_which_no_name_fits_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    message = fails(load_checkpoint_in_model, nn.Sequential(net()), tmp_path)
    assert "not in the model: 0.bias, 0.weight" in message
    assert "strict" not in message


# -- device and dtype ----------------------------------------------------------------------


def test_a_device_map_places_submodules(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net().to("meta")
    load_checkpoint_in_model(
        fresh, tmp_path, device_map={"": "cpu", "2.weight": torch.device("cpu")}
    )
    assert same(fresh, model)
    message = fails(load_checkpoint_in_model, net(), tmp_path, device_map={"0": "cpu"})
    assert "does not give any device for the following parameters: 1.weight" in message
    wrong = {"0": "cpu", "1": "coal", "2": "meta"}
    message = fails(load_checkpoint_in_model, net(), tmp_path, device_map=wrong)
    for part in ("['2']='meta': weights on meta", "'coal'"):
        assert part in message


def test_a_dispatched_model_is_loaded_by_a_device_map(tmp_path: Path) -> None:
    model = saved(tmp_path)
    fresh = cpu_offload(net(), "cpu")
    message = fails(load_checkpoint_in_model, fresh, tmp_path)
    assert "its weights are offloaded" in message
    load_checkpoint_in_model(fresh, tmp_path, {"": "cpu"}, strict=True)
    assert same(fresh, model)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the machine has an accelerator")
def test_devices_that_this_machine_lacks(tmp_path: Path) -> None:
    saved(tmp_path)
    for device in (0, "cuda:0"):
        message = fails(load_checkpoint_in_model, net(), tmp_path, device_map={"": device})
        assert "this machine has" in message


@pytest.mark.gpu
def test_a_device_map_spreads_a_model(tmp_path: Path) -> None:
    model = saved(tmp_path)
    for fresh in (net(), net().to("meta")):
        load_checkpoint_in_model(fresh, tmp_path, device_map={"": 0, "2": "cpu"})
        assert {p.device.type for p in fresh[0].parameters()} == {"cuda"}
        assert {p.device.type for p in fresh[2].parameters()} == {"cpu"}
        assert same(fresh.cpu(), model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_become_the_dtype(tmp_path: Path, device: str) -> None:
    model = saved(tmp_path)
    for dtype in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        fresh = net().to(device)
        load_checkpoint_in_model(fresh, tmp_path, dtype=dtype)
        assert fresh[0].weight.dtype == fresh[1].running_mean.dtype == torch.bfloat16
        assert fresh[1].num_batches_tracked.dtype == torch.int64
        assert torch.equal(fresh[0].weight, model[0].weight.bfloat16())
    assert "Did you mean 'float32'" in fails(
        load_checkpoint_in_model, net(), tmp_path, dtype="flaot32"
    )


def test_some_modules_stay_in_fp32(tmp_path: Path) -> None:
    model = saved(tmp_path)
    fresh = net().to("meta")
    keep = {"dtype": torch.float16, "keep_in_fp32_modules": ["2"]}
    load_checkpoint_in_model(fresh, tmp_path, **keep)
    assert fresh[0].weight.dtype == torch.float16
    assert torch.equal(fresh[2].weight, model[2].weight)
    message = fails(load_checkpoint_in_model, net(), tmp_path, keep_in_fp32_modules=["7"])
    assert "keep_in_fp32_modules: '7'" in message


def test_the_models_own_dtype_holds_otherwise(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net().half()
    load_checkpoint_in_model(fresh, checkpoint=str(tmp_path))
    assert torch.equal(fresh[0].weight, model[0].weight.half())


# -- the rest ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_codes_of_quantized_weights_are_no_weights(tmp_path: Path, device: str) -> None:
    state = net().state_dict()
    state["0.weight"] = torch.ones(4, 3, dtype=torch.int8)
    export_model(state, tmp_path)
    message = fails(load_checkpoint_in_model, net().to(device), tmp_path)
    assert "0.weight (int8): they are codes of quantized weights" in message


def test_legacy_files_may_be_mapped_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mapped = saved(tmp_path, safe=False), []
    load = torch.load

    def spy(path: Any, **kwargs: Any) -> Any:
        mapped.append((kwargs["map_location"], kwargs["mmap"], kwargs["weights_only"]))
        return load(path, **kwargs)

    monkeypatch.setattr(serialization.torch, "load", spy)
    for wanted in (True, False):
        fresh = net()
        load_checkpoint_in_model(fresh, tmp_path, offload_state_dict=wanted)
        assert same(fresh, model)
        assert mapped.pop() == ("cpu", wanted, True)
        assert mapped.pop() == ("meta", False, True)


def test_other_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="full_state_dict=False"):
        load_checkpoint_in_model(net(), "never looked at", full_state_dict=False)
    message = fails(load_checkpoint_in_model, net(), "never looked at", offload_8bit_bnb=True)
    for part in ("offload_8bit_bnb=True", "stay on their device", "4 bits"):
        assert part in message


def test_what_offloading_needs_is_asked_for() -> None:
    message = fails(load_checkpoint_in_model, net(), "never looked at", device_map={"": "disk"})
    assert "please pass along an `offload_folder`" in message
    assert "load_checkpoint_and_dispatch" in fails(
        load_checkpoint_in_model, net(), "never looked at", device_map="auto"
    )


DISK = {"0": "cpu", "1": "disk", "2": "disk"}


def test_buffers_are_offloaded_on_request_in_memory(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net()
    options = {"offload_folder": tmp_path / "off", "offload_buffers": True, "dtype": "bfloat16"}
    load_checkpoint_in_model(fresh, tmp_path, DISK, **options)
    assert fresh[1].running_mean.is_meta
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "off")
    assert torch.equal(weights["1.running_mean"], model[1].running_mean.bfloat16())
    assert fresh[0].weight.dtype == torch.bfloat16


BLOCKS = 12


def measured(folder: Path, kind: str) -> dict[str, dict[str, float]]:
    """Return what one turn of each contestant needed, by contestant."""
    arguments = argparse.Namespace(blocks=BLOCKS, threads=1, warm=True, turns=1, folder=str(folder))
    found = bench_large.in_child(f"{kind}-accel", arguments)
    assert isinstance(found, dict), found
    return {name: turns[0] for name, turns in found.items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are those of Linux")
def test_a_model_of_three_times_the_memory(tmp_path: Path) -> None:
    bench_large.write(tmp_path, BLOCKS, per_shard=1)
    found = measured(tmp_path, "forward")
    assert found["accel"]["value"] == found["hand"]["value"]
    # A block in memory, two of which one is read ahead, and what the hooks are made of.
    assert found["accel"]["peak"] < BLOCKS * bench_large.BLOCK_BYTES / bench_large.SHARE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are those of Linux")
def test_of_a_sharded_checkpoint_one_shard_is_in_memory_beside_the_model(tmp_path: Path) -> None:
    bench_large.write(tmp_path, BLOCKS, per_shard=3)
    # The model is in memory before: the peak is what comes beside it.
    peak = measured(tmp_path, "load")["accel"]["peak"]
    assert peak < bench_large.MEMORY_BUDGET * 3 * bench_large.BLOCK_BYTES
