"""E1: linear layers of 8 and 4 bits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel import Accelerator, init_empty_weights
from accel.config.quantization import BnbQuantizationConfig
from accel.machine.errors import CheckpointError, ConfigError, MissingPackageError
from accel.machine.imports import is_available
from accel.utils import load_and_quantize_model
from accel.weights import quantize
from accel.weights import quantize as layers
from tests.accel.weights.models import Tied, net

installed = pytest.mark.skipif(
    not is_available("bitsandbytes"), reason="needs bitsandbytes (extra quantized)"
)
pytestmark = installed
X = torch.linspace(-1, 1, 128).reshape(4, 32)


class Model(nn.Module):
    """Two quantizable layers, a norm with a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 8)
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.norm(self.up(x.to(self.norm.weight.dtype))).relu())
        out: torch.Tensor = self.head(hidden.to(self.head.weight.dtype)) + self.get_buffer("shift")
        return out


def model() -> Model:
    """Return a model with weights, always the same."""
    torch.manual_seed(0)
    return Model().eval()


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


def config(bits: int = 8, **given: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(
        **{"load_in_8bit": bits == 8, "load_in_4bit": bits == 4, "torch_dtype": "fp32", **given}
    )


def error(found: nn.Module, x: torch.Tensor = X) -> float:
    """Return the relative error of a model's outputs."""
    expected = model()(x).detach()
    return float((found(x).detach().float() - expected).norm() / expected.norm())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the weights of the model in two shards."""
    state = model().state_dict()
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: state[name] for name in some}, tmp_path / file)
    weight_map = {name: file for file, some in parts.items() for name in some}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def kinds(found: nn.Module) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in found.named_modules() if isinstance(m, nn.Linear)}


# -- weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "kind", "worst"), [(8, "Linear8bitLt", 0.02), (4, "Linear4bit", 0.2)]
)
def test_a_model_is_quantized(bits: int, kind: str, worst: float) -> None:
    own = model()
    found = load_and_quantize_model(own, config(bits))
    assert found is own
    assert kinds(found) == {"up": kind, "down": kind, "head": "Linear"}
    assert 0 < error(found) < worst
    assert getattr(found, f"is_loaded_in_{bits}bit")
    assert not found.training
    assert found.norm.running_mean.dtype == torch.float32
    with pytest.raises(ConfigError, match="Model: it is quantized already"):
        load_and_quantize_model(found, config(bits))


@pytest.mark.parametrize("bits", [8, 4])
def test_files_are_quantized_as_they_are_read(folder: Path, bits: int) -> None:
    own = load_and_quantize_model(model(), config(bits))
    found = load_and_quantize_model(empty(), config(bits), folder, device_map={"": "cpu"})
    assert torch.equal(found(X), own(X))
    by_index = folder / "model.safetensors.index.json"
    again = load_and_quantize_model(model(), config(bits), weights_location=by_index)
    assert torch.equal(again(X), own(X))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_model_is_saved_and_loaded(tmp_path: Path, bits: int) -> None:
    own = load_and_quantize_model(model(), config(bits, bnb_4bit_use_double_quant=True))
    expected = own(X)
    Accelerator(cpu=True).save_model(own, tmp_path, max_shard_size="3KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stored = {k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()}
    assert stored["up.weight"].dtype in (torch.int8, torch.uint8)
    settings = config(bits, bnb_4bit_use_double_quant=True)
    found = load_and_quantize_model(empty(), settings, weights_location=tmp_path)
    assert torch.equal(found(X), expected)
    with pytest.raises(CheckpointError, match=f"quantized to {12 - bits} bits"):
        load_and_quantize_model(empty(), config(12 - bits), tmp_path)


def test_other_weights_have_the_dtype() -> None:
    found = load_and_quantize_model(
        model(), config(torch_dtype="bf16", keep_in_fp32_modules=["norm"])
    )
    assert found.head.weight.dtype == found.up.bias.dtype == torch.bfloat16
    assert found.norm.weight.dtype == found.norm.running_mean.dtype == torch.float32
    assert found.norm.num_batches_tracked.dtype == torch.int64
    assert error(found) < 0.03


def test_settings_reach_the_layers() -> None:
    eight = load_and_quantize_model(model(), config(llm_int8_threshold=0.5, skip_modules=["up"]))
    assert kinds(eight) == {"up": "Linear", "down": "Linear8bitLt", "head": "Linear8bitLt"}
    assert eight.down.state.threshold == 0.5
    four = load_and_quantize_model(
        model(),
        config(
            4,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype="bf16",
        ),
    )
    assert four.up.weight.quant_type == "nf4"
    assert four.up.weight.quant_state.nested
    assert four.up.compute_dtype == torch.bfloat16
    given = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "fp16"}
    for settings in (config(4), config(4, **given)):
        _check_defaults(load_and_quantize_model(model(), settings))


def _check_defaults(plain: nn.Module) -> None:
    assert plain.up.weight.quant_type == "fp4"
    assert not plain.up.weight.quant_state.nested
    assert plain.up.compute_dtype == torch.float16


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_pass_through_quantized_layers(bits: int) -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    x = torch.randn(4, 64, requires_grad=True)
    expected = torch.autograd.grad(wide(x).sum(), x)[0]
    found = load_and_quantize_model(wide, config(bits))
    with torch.no_grad():
        found(x)  # once without gradients, as an evaluation does
    gradient = torch.autograd.grad(found(x).sum(), x)[0]
    assert torch.cosine_similarity(gradient, expected).min() > 0.97
    assert not found[0].weight.requires_grad


class Shared(nn.Module):
    """A model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.inner = nn.Linear(32, 32)
        self.head = nn.Linear(32, 8, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    own = Shared()
    state = own.state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        ghost = Shared()
    for found in (
        load_and_quantize_model(own, config()),
        load_and_quantize_model(ghost, config(), tmp_path),
    ):
        assert found.head.weight is found.embed.weight
        assert torch.equal(found.head.weight, state["embed.weight"])
    with init_empty_weights():
        ghost = Shared()
    whole = load_and_quantize_model(ghost, config(skip_modules=[]), tmp_path)
    assert kinds(whole)["head"] == "Linear8bitLt"
    assert whole.embed.weight.dtype == torch.float32


# -- devices -------------------------------------------------------------------------------


def test_a_map_is_made_of_quantized_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def inferred(word: str, *args: Any, **kwargs: Any) -> dict[str, str]:
        given["args"] = (word, *args)
        return {"": "cpu"}

    monkeypatch.setattr(quantize, "inferred_device_map", inferred)
    load_and_quantize_model(
        model(),
        config(keep_in_fp32_modules=["norm"], torch_dtype="bf16"),
        device_map="auto",
        no_split_module_classes=["Model"],
        max_memory={"cpu": "1GB"},
    )
    word, _, max_memory, no_split, dtype, special = given["args"]
    assert (word, max_memory, no_split) == ("auto", {"cpu": "1GB"}, ["Model"])
    assert dtype == torch.bfloat16
    assert special["up.weight"] == torch.int8
    assert special["norm.bias"] == torch.float32
    assert "head.weight" not in special


def test_a_word_places_a_model() -> None:
    found = load_and_quantize_model(model(), config(), device_map="auto", max_memory={"cpu": "1MB"})
    assert kinds(found)["up"] == "Linear8bitLt"
    assert error(found) < 0.02


def test_offloaded_layers_of_4_bits_are_kept(folder: Path, tmp_path: Path) -> None:
    where = {"up": "cpu", "norm": "cpu", "down": "disk", "head": "disk", "shift": "cpu"}
    found = load_and_quantize_model(
        empty(), config(4), folder, device_map=where, offload_folder=tmp_path / "away"
    )
    assert kinds(found) == {"up": "Linear4bit", "down": "Linear", "head": "Linear"}
    assert found.down.weight.is_meta
    assert (tmp_path / "away" / "down.weight.dat").exists()
    assert error(found) < 0.2
    own = load_and_quantize_model(model(), config(4, skip_modules=["down", "head"]))
    assert torch.equal(found(X), own(X))


def test_offloading_that_cannot_be_is_refused(tmp_path: Path) -> None:
    where = {"up": "cpu", "norm": "cpu", "down": "disk", "head": "cpu", "shift": "cpu"}
    with pytest.raises(ConfigError, match=r"device_map offloads down: 8-bit layers stay"):
        load_and_quantize_model(model(), config(), device_map=where, offload_folder=tmp_path)
    with pytest.raises(ConfigError, match="sends down to 'disk': it needs a folder"):
        load_and_quantize_model(model(), config(4), device_map=where)
    with pytest.raises(ConfigError, match="does not give any device"):
        load_and_quantize_model(model(), config(4), device_map={"up": "cpu"})


# -- what is wrong -------------------------------------------------------------------------


def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = model().state_dict()
    path = tmp_path / "model.safetensors"

    def load(fresh: nn.Module, **changes: torch.Tensor) -> nn.Module:
        kept = {**state, **changes}
        save_file({name: value for name, value in kept.items() if value is not None}, path)
        return load_and_quantize_model(fresh, config(), path)

    for name in ("up.weight", "up.bias", "norm.running_var"):
        lacking: Any = {name: None}
        with init_empty_weights(include_buffers=True):
            ghost = Model()
        ghost.register_buffer("shift", torch.ones(8), persistent=False)
        with pytest.raises(CheckpointError, match=f"lacks 1 weights .* no data for: {name}"):
            load(ghost, **lacking)
    with pytest.raises(
        CheckpointError, match=r"head.weight of shape \[2\]: the model has \[8, 32\]"
    ):
        load(empty(), **{"head.weight": torch.ones(2)})
    absent: Any = {"head.bias": None, "other": torch.ones(1)}
    with caplog.at_level(logging.WARNING):
        load(model(), **absent)
    assert "missing: head.bias; not in the model: other" in caplog.text


def test_a_model_without_weights_needs_files() -> None:
    with pytest.raises(ConfigError, match="weights_location=None: the model is on the meta"):
        load_and_quantize_model(empty(), config())


def test_legacy_files_may_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(model().state_dict(), tmp_path / "pytorch_model.bin")
    asked: list[bool] = []
    find = quantize.files.find

    def finding(location: Any, mmap: bool) -> Any:
        asked.append(mmap)
        return find(location, mmap)

    monkeypatch.setattr(quantize.files, "find", finding)
    for mmap in (False, True):
        found = load_and_quantize_model(empty(), config(), tmp_path, offload_state_dict=mmap)
        assert error(found) < 0.02
    assert (asked[0], asked[-1]) == (False, True)  # a folder's file is looked for, too


def test_without_bitsandbytes_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda _: False)
    with pytest.raises(MissingPackageError, match=r"load_and_quantize_model.*\[quantized\]"):
        load_and_quantize_model(model(), config())


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_is_quantized_on_a_gpu(folder: Path, bits: int) -> None:
    found = load_and_quantize_model(empty(), config(bits, torch_dtype="fp16"), folder, "auto")
    assert next(found.parameters()).is_cuda
    expected = model()(X)
    assert float((found(X.cuda()).cpu().float() - expected).norm() / expected.norm()) < 0.2


EIGHT = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")


class Attention(nn.Module):
    """A module that uses the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 16)
        self.head = nn.Linear(16, 8)


def four(**given: object) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32", **given)  # type: ignore[arg-type]


def test_heads_and_tied_weights_stay() -> None:
    assert layers.to_quantize(net(), EIGHT) == ["0.linear"]
    assert layers.to_quantize(Tied(), EIGHT) == ["block.linear"]
    assert layers.to_quantize(Attention(), EIGHT) == ["up"]


def test_the_output_embeddings_of_a_model_are_its_head() -> None:
    model = Attention()
    model.get_output_embeddings = lambda: model.up  # type: ignore[assignment]
    assert layers.to_quantize(model, EIGHT) == ["head"]


def test_modules_are_named_fully_or_by_a_part() -> None:
    def found(**given: list[str]) -> list[str]:
        return layers.to_quantize(net(), BnbQuantizationConfig(load_in_8bit=True, **given))  # type: ignore[arg-type]

    assert found(skip_modules=[]) == ["0.linear", "1.linear"]
    assert found(skip_modules=["0"]) == found(skip_modules=["0.linear"]) == ["1.linear"]
    assert found(skip_modules=[], keep_in_fp32_modules=["1"]) == ["0.linear"]
    with pytest.raises(ConfigError, match=r"skip_modules: '0\.liner'.*mean '0\.linear'"):
        found(skip_modules=["0.liner"])
