"""Which layers are quantized, and how a layer gets its weight."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accel.config.quantization import BnbQuantizationConfig
from accel.machine.errors import CheckpointError, ConfigError, MissingPackageError
from accel.machine.imports import is_available
from accel.weights import quantize as layers
from tests.accel.weights.models import Tied, net

EIGHT = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
CPU = torch.device("cpu")
installed = pytest.mark.skipif(
    not is_available("bitsandbytes"), reason="needs bitsandbytes (extra quantized)"
)


class Attention(nn.Module):
    """A module that uses the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 16)
        self.head = nn.Linear(16, 8)


def four(**given: object) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32", **given)  # type: ignore[arg-type]


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda _: False)
    with pytest.raises(MissingPackageError, match=r"accel-runner\[quantized\]"):
        layers.bitsandbytes("load_and_quantize_model")


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


def test_a_model_without_linear_layers_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert layers.to_quantize(nn.Sequential(nn.Conv1d(1, 1, 1)), EIGHT) == []
    assert "No linear modules were found" in caplog.text


@installed
def test_a_weight_is_quantized_on_its_device() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32).eval()
    x = torch.randn(4, 64)
    worst = {}
    for name, config in {
        "8": EIGHT,
        "nf4": four(bnb_4bit_quant_type="nf4"),
        "double": four(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    }.items():
        layer = layers.empty_layer(linear, config)
        assert layer.weight.is_meta
        assert not layer.training
        layers.fill("x", layer, {"weight": linear.weight}, CPU, config)
        layer.bias = nn.Parameter(linear.bias.detach().clone())
        assert layer.weight.dtype in (torch.int8, torch.uint8)
        expected = linear(x).detach()
        worst[name] = float((layer(x).detach() - expected).norm() / expected.norm())
    # A scale a row of 127 steps; 16 values a block of 64, at most 0.15 of its largest apart.
    assert 0 < worst["8"] < 1 / 127
    assert 1 / 127 < worst["nf4"] < 0.15
    assert worst["nf4"] != worst["double"] < 0.15


@installed
@pytest.mark.parametrize("config", [EIGHT, four(), four(bnb_4bit_use_double_quant=True)])
def test_a_quantized_weight_is_taken_as_it_is(config: BnbQuantizationConfig) -> None:
    linear = nn.Linear(64, 32, bias=False)
    first, second = (layers.empty_layer(linear, config) for _ in range(2))
    layers.fill("x", first, {"weight": linear.weight}, CPU, config)
    state = {name: value.clone() for name, value in first.state_dict().items()}
    parts = {name: value for name, value in state.items() if not layers.is_plain(name)}
    layers.fill("x", second, parts, CPU, config)
    x = torch.randn(4, 64)
    assert torch.equal(first(x), second(x))
    again = second.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())


@installed
def test_a_weight_of_another_kind_is_refused() -> None:
    layer = layers.empty_layer(nn.Linear(4, 2), EIGHT)
    with pytest.raises(
        CheckpointError, match=r"a\.weight of shape \[2, 3\]: the model has \[2, 4\]"
    ):
        layers.fill("a", layer, {"weight": torch.ones(2, 3)}, CPU, EIGHT)
    with pytest.raises(CheckpointError, match=r"a\.weight of uint8: it is neither.*to 8 bits"):
        layers.fill("a", layer, {"weight": torch.ones(2, 4).byte()}, CPU, EIGHT)
