"""load_checkpoint_in_model: any documented layout, into models in memory and on meta."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, load_checkpoint_in_model
from accel.checkpoint import serialization
from accel.checkpoint.export import export_model
from accel.machine.errors import CheckpointError, ConfigError, NotBuiltError
from accel.utils import OffloadedWeightsLoader

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


class Tied(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, **kwargs)
        self.head = nn.Linear(3, 5, bias=False, **kwargs)
        self.head.weight = self.embedding.weight


class Counting(nn.Module):
    """A module whose state holds a value that is no tensor."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.seen = seen

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


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


def test_weights_are_loaded(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net()
    load_checkpoint_in_model(fresh, str(tmp_path))
    assert same(fresh, model)


def test_a_checkpoint_is_looked_for_where_it_is_said_to_be(tmp_path: Path) -> None:
    saved(tmp_path / "other")
    model, fresh = saved(tmp_path / "own"), net()
    load_checkpoint_in_model(fresh, checkpoint=tmp_path / "own")
    assert same(fresh, model)


def test_a_prepared_model_keeps_its_parameters(tmp_path: Path) -> None:
    model = saved(tmp_path)
    fresh = net()
    before = list(fresh.parameters())
    load_checkpoint_in_model(nn.DataParallel(Accelerator(cpu=True).prepare(fresh)), tmp_path)
    assert same(fresh, model)
    assert all(map(lambda a, b: a is b, fresh.parameters(), before))


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


def test_names_must_match_if_strict(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_stay_tied(tmp_path: Path, device: str) -> None:
    model, fresh = Tied(), Tied(device=device)
    export_model(model.state_dict(), tmp_path)
    load_checkpoint_in_model(fresh, tmp_path, strict=True)
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.head.weight, model.head.weight)
    # Another library's file has one of the two names, and does not tell of the other.
    torch.save({"head.weight": torch.ones(5, 3)}, tmp_path / "one.bin")
    again = Tied(device=device)
    load_checkpoint_in_model(again, tmp_path / "one.bin", strict=True)
    assert again.head.weight is again.embedding.weight
    assert torch.equal(again.embedding.weight, torch.ones(5, 3))


def test_values_that_are_no_tensors_are_loaded(tmp_path: Path) -> None:
    model, fresh = Counting(7), Counting(0)
    export_model(model.state_dict(), tmp_path, safe=False)
    load_checkpoint_in_model(fresh, tmp_path, strict=True)
    assert fresh.seen == 7
    assert torch.equal(fresh.weight, model.weight)


# -- device and dtype ----------------------------------------------------------------------


def test_a_device_map_places_submodules(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net().to("meta")
    load_checkpoint_in_model(
        fresh, tmp_path, device_map={"": "cpu", "2.weight": torch.device("cpu")}
    )
    assert same(fresh, model)
    message = fails(load_checkpoint_in_model, net(), tmp_path, device_map={"0": "cpu"})
    assert "gives no device to 1.weight" in message
    assert "0.weight" not in message
    wrong = {"0": "cpu", "1": "cpu", "2": "meta", "3": "cpu", "4.x": "coal"}
    message = fails(load_checkpoint_in_model, net(), tmp_path, device_map=wrong)
    for part in ("['2']='meta': weights on meta", "['3']: the model has no such", "'coal'"):
        assert part in message


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
    load_checkpoint_in_model(fresh, tmp_path)
    assert torch.equal(fresh[0].weight, model[0].weight.half())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_codes_of_quantized_weights_are_no_weights(tmp_path: Path, device: str) -> None:
    state = net().state_dict()
    state["0.weight"] = torch.ones(4, 3, dtype=torch.int8)
    export_model(state, tmp_path)
    message = fails(load_checkpoint_in_model, net().to(device), tmp_path)
    assert "0.weight (int8): they are codes of quantized weights" in message


def test_what_was_read_is_no_view_of_the_file(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net().to("meta")
    load_checkpoint_in_model(fresh, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert same(fresh, model)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in fresh.parameters())


# -- the rest ------------------------------------------------------------------------------


def test_legacy_files_may_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(NotBuiltError, match="full_state_dict=False"):
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


def test_a_folder_for_offloading_alone_does_no_harm(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net()
    load_checkpoint_in_model(fresh, tmp_path, offload_folder="x", offload_buffers=True)
    assert same(fresh, model)


DISK = {"0": "cpu", "1": "disk", "2": "disk"}


@pytest.mark.parametrize("layout", ["folder", "shards", "legacy folder"])
def test_what_is_in_memory_beside_weights_on_disk_keeps_its_identity(
    tmp_path: Path, layout: str
) -> None:
    """Torch notes in the versions of modules that weights on meta were assigned."""
    place, how = LAYOUTS[layout]
    saved_model = saved(tmp_path, **how)
    with torch.device("meta"):
        model = net()
    model[1] = nn.BatchNorm1d(4)
    model[1].weight = nn.Parameter(torch.empty(4, device="meta"))
    before = {name: tensor for name, tensor in model[1].state_dict(keep_vars=True).items()}
    load_checkpoint_in_model(
        model,
        tmp_path / place,
        device_map={"0": "disk", "1": "cpu", "2": "cpu"},
        offload_folder=tmp_path / "offload",
        dtype=torch.bfloat16,
    )
    for name in ("bias", "running_mean", "running_var", "num_batches_tracked"):
        found = getattr(model[1], name)
        assert found is before[name]
        wanted = saved_model[1].state_dict()[name]
        assert torch.equal(
            found, wanted.to(torch.bfloat16) if wanted.is_floating_point() else wanted
        )
        assert found.dtype == (torch.bfloat16 if wanted.is_floating_point() else torch.int64)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layout", ["folder", "shards", "legacy folder"])
def test_weights_stay_on_disk(tmp_path: Path, device: str, layout: str) -> None:
    model, fresh = saved(tmp_path, **LAYOUTS[layout][1]), net().to(device)
    off = tmp_path / "off"
    load_checkpoint_in_model(fresh, tmp_path, DISK, offload_folder=off)
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert torch.equal(fresh[1].running_mean, model[1].running_mean)
    assert all(p.is_meta for p in (*fresh[1].parameters(), *fresh[2].parameters()))
    weights = OffloadedWeightsLoader(save_folder=off)
    assert set(weights) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert all(torch.equal(weights[n], v) for n, v in model.state_dict().items() if n in weights)
    copied = len(list(off.glob("*.dat")))
    assert copied == (4 if layout.startswith("legacy") else 0)


def test_buffers_are_offloaded_on_request(tmp_path: Path) -> None:
    model, fresh = saved(tmp_path), net()
    options = {"offload_folder": tmp_path / "off", "offload_buffers": True, "dtype": "bfloat16"}
    load_checkpoint_in_model(fresh, tmp_path, DISK, **options)
    assert fresh[1].running_mean.is_meta
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "off")
    assert torch.equal(weights["1.running_mean"], model[1].running_mean.bfloat16())
    assert fresh[0].weight.dtype == torch.bfloat16


def test_tied_weights_on_disk_are_there_under_each_name(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied(device="meta")
    torch.save({"head.weight": model.head.weight.detach()}, tmp_path / "one.bin")
    load_checkpoint_in_model(fresh, tmp_path / "one.bin", {"": "disk"}, tmp_path)
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(
        torch.equal(weights[name], model.head.weight)
        for name in ("head.weight", "embedding.weight")
    )
    half = Tied(device="meta")
    where = {"embedding": "cpu", "head": "disk"}
    load_checkpoint_in_model(half, tmp_path / "one.bin", where, tmp_path / "off")
    assert torch.equal(half.embedding.weight, model.embedding.weight)
    assert half.head.weight is half.embedding.weight
