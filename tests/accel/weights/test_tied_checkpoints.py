"""Checkpoints of tied weights: several values of one, and several dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from accel import (
    Accelerator,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import remove_hook_from_submodules
from tests.accel.weights.models import Tied

TOKENS = torch.arange(6)
MAPS = [{"": "cpu"}, {"": "disk"}, {"": "cpu", "embedding": "disk"}, {"": "cpu", "head": "disk"}]


def made() -> Tied:
    torch.manual_seed(0)
    model = Tied().eval()
    model.head.bias = nn.Parameter(torch.ones(6))
    return model


def empty() -> Tied:
    with init_empty_weights(include_buffers=False):
        return made()


def shifted(model: nn.Module) -> nn.Module:
    """Give a model the buffer that is in no checkpoint."""
    kept = model.get_parameter("head.weight").dtype
    model.get_submodule("block")._buffers["shift"] = made().get_buffer("block.shift").to(kept)
    return model


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("build", [empty, made])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_of_a_tied_weight_with_two_values_the_last_is_loaded(
    where: dict[str, str], build: Callable[[], Tied], form: str, tmp_path: Path
) -> None:
    plain = made()
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
        assert torch.equal(model(TOKENS), plain(TOKENS))
        remove_hook_from_submodules(model)


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("kept", ["head", "embedding"])
def test_a_tied_weight_stays_in_fp32_under_all_its_names(
    where: dict[str, str], kept: str, tmp_path: Path
) -> None:
    Accelerator(cpu=True).save_model(made(), tmp_path / "weights")
    model = empty()
    folder, dtype = tmp_path / "off", torch.bfloat16
    load_checkpoint_in_model(
        model, tmp_path / "weights", where, folder, dtype, keep_in_fp32_modules=[kept]
    )
    shifted(model)
    dispatch_model(model, where, "cpu", offload_dir=folder)
    assert torch.allclose(model(TOKENS).float(), made()(TOKENS), rtol=0.05, atol=0.05)
    remove_hook_from_submodules(model)
    weight = model.get_parameter("head.weight")
    assert weight is model.get_parameter("embedding.weight")
    assert weight.dtype == torch.float32


@pytest.mark.parametrize("where", MAPS[2:])
@pytest.mark.parametrize("names", [("head", "embedding"), ("head",), ("embedding",)])
def test_a_checkpoint_is_loaded_into_the_one_that_stays(
    where: dict[str, str], names: tuple[str, ...], tmp_path: Path
) -> None:
    plain = made()
    state = {n: v + (n != "head.bias") for n, v in plain.state_dict().items()}
    plain.load_state_dict(state)
    tied = ("head.weight", "embedding.weight")
    stored = {n: v for n, v in state.items() if n not in tied or n.partition(".")[0] in names}
    torch.save(stored, tmp_path / "model.pt")
    model = dispatch_model(made(), where, "cpu", offload_dir=tmp_path / "off")
    load_checkpoint_in_model(model, tmp_path / "model.pt")
    for _ in range(2):
        assert torch.equal(model(TOKENS), plain(TOKENS))
        remove_hook_from_submodules(model)


class Scaled(nn.Module):
    """Has a weight of its own beside a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs)
        return outputs * self.scale


@pytest.mark.parametrize("kept", ["0", "1", "scale"])
def test_what_lies_within_a_module_in_fp32_is_in_fp32(kept: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled(), nn.Linear(4, 4))
    model[1].scale = model[0].scale
    Accelerator(cpu=True).save_model(model, tmp_path / "weights")
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    load_checkpoint_in_model(
        model, tmp_path / "weights", dtype=torch.bfloat16, keep_in_fp32_modules=[kept]
    )
    found = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in found.items() if dtype == torch.bfloat16} == {
        "2.weight",
        "2.bias",
    }
    outputs = model(inputs.to(torch.bfloat16))
    assert torch.allclose(outputs.float(), expected, rtol=0.05, atol=0.05)
