"""State dicts of models with quantized layers: a frozen base of 4 or 8 bits with LoRA resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel import Accelerator, load_checkpoint_in_model
from accel.machine.errors import CheckpointError
from accel.machine.imports import is_available
from accel.utils import BnbQuantizationConfig, load_and_quantize_model
from accel.weights.state import load_quantized
from tests.accel.weights.test_quantized_layers import installed

pytestmark = installed
llama = pytest.mark.skipif(
    not (is_available("transformers") and is_available("peft")),
    reason="needs transformers and peft (extra examples)",
)
X = torch.linspace(-1, 1, 128).reshape(2, 64)
WAYS = [(4, {}), (4, {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}), (8, {})]


class Model(nn.Module):
    """A layer that is quantized and one that is not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(64, 128)
        self.head = nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.up(x).relu())
        return out


def quantized(model: nn.Module, bits: int = 4, **given: Any) -> nn.Module:
    config = BnbQuantizationConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, torch_dtype="fp32", **given
    )
    return load_and_quantize_model(model, config)


def adapted(bits: int, given: dict[str, Any]) -> Any:
    """Return a tiny llama with a quantized base, a random one each time, and LoRA with dropout."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    base = quantized(transformers.LlamaForCausalLM(config), bits, **given)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(base, lora)


class Run:
    """A few steps of LoRA."""

    def __init__(self, seed: int, bits: int, given: dict[str, Any]) -> None:
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(seed)
        model = adapted(bits, given)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def losses(self, steps: range) -> list[float]:
        """Return the loss of each step."""
        found = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 64, (2, 16), generator=generator)
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found


@llama
@pytest.mark.parametrize(("bits", "given"), WAYS)
@pytest.mark.filterwarnings("ignore")  # of peft and bitsandbytes
def test_lora_on_a_quantized_base_resumes_bit_equal(
    bits: int, given: dict[str, Any], tmp_path: Path
) -> None:
    first = Run(0, bits, given)
    first.losses(range(2))
    first.accelerator.save_state(tmp_path / "state")
    expected = first.losses(range(2, 5))
    weights = first.accelerator.get_state_dict(first.model)
    first.accelerator.save_model(first.model, tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in written.items())
    first.accelerator.free_memory()

    second = Run(1, bits, given)  # of another base, which the checkpoint's takes the place of
    assert second.losses(range(2)) != expected[:2]
    second.accelerator.load_state(tmp_path / "state")
    assert second.losses(range(2, 5)) == expected


@pytest.mark.parametrize(("bits", "given"), WAYS)
@pytest.mark.parametrize("has_run", [False, True])
def test_codes_and_scales_are_loaded_together(
    bits: int, given: dict[str, Any], has_run: bool, tmp_path: Path
) -> None:
    source, target = quantized(Model(), bits, **given), quantized(Model(1), bits, **given)
    expected = source(X)
    if has_run:
        target(X)
    # So small that a layer's entries lie in several files.
    Accelerator(cpu=True).save_model(source, tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    load_checkpoint_in_model(target, tmp_path, dtype="bfloat16", keep_in_fp32_modules=["head"])
    assert target.up.weight.dtype == source.up.weight.dtype
    target.float()
    target.up.bias.data.copy_(source.up.bias)  # which bf16 rounded
    assert torch.equal(target(X), expected)
    state = target.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


def test_without_quantized_layers_nothing_is_changed() -> None:
    state = {"up.weight": torch.ones(1), "other": 3}
    assert load_quantized(Model(), state) == state


def test_a_layer_that_is_lacking_is_reported_by_torch() -> None:
    model = quantized(Model())
    rest = load_quantized(model, {"head.bias": torch.zeros(4)})
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight"):
        model.load_state_dict(rest)


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def test_what_does_not_fit_is_refused_and_nothing_loaded() -> None:
    model = quantized(Model())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    good = quantized(Model(1)).state_dict()
    wide = quantized(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))).state_dict()
    other = {**good, **{f"up{key[1:]}": v for key, v in wide.items() if key.startswith("0.w")}}
    cases = [
        (Model().state_dict(), "floating weights with load_and_quantize_model"),
        (quantized(Model(), 8).state_dict(), "which belong together"),
        (without(good, "up.weight.absmax"), "which belong together"),
        (without(good, "up.weight"), "no codes"),
        (other, r"up.weight: \[2048, 1\] uint8: the layer has \[4096, 1\]"),
        (quantized(Model(), bnb_4bit_quant_type="nf4").state_dict(), "belong together"),
    ]
    for state, message in cases:
        with pytest.raises(CheckpointError, match=message):
            load_quantized(model, state)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_another_form_of_4_bits_is_refused() -> None:
    model = quantized(Model())
    state = quantized(Model()).state_dict()
    turned = nn.Linear(128, 64, bias=False)  # as many codes and scales, in another shape
    donor = quantized(nn.ModuleDict({"up": turned, "head": nn.Linear(2, 2)})).state_dict()
    packed = next(key for key in state if ".quant_state." in key)
    with pytest.raises(CheckpointError, match="another block size, dtype or shape"):
        load_quantized(model, {**state, packed: donor[packed]})


def test_a_layer_whose_files_lack_an_entry_is_refused(tmp_path: Path) -> None:
    model = quantized(Model())
    torch.save(without(model.state_dict(), "up.weight.absmax"), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"up: .*which belong together"):
        load_checkpoint_in_model(model, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_module_kept_in_fp32_takes_what_the_others_return(bits: int) -> None:
    config = BnbQuantizationConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        torch_dtype="bf16",
        keep_in_fp32_modules=["head"],
    )
    model = load_and_quantize_model(Model(), config)
    assert model.head.weight.dtype == torch.float32
    found = model(X.to(torch.bfloat16))
    assert found.dtype == torch.bfloat16
    expected = Model()(X)
    assert (found.float() - expected).norm() < 0.3 * expected.norm()
