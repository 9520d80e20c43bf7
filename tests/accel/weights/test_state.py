"""E4, R2: state dicts of offloaded and quantized models hold and load their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_in_model,
)
from accel.hooks import ModelHook, add_hook_to_module
from accel.machine.errors import CheckpointError, StateError
from accel.machine.imports import is_available
from accel.utils import (
    BnbQuantizationConfig,
    align_module_device,
    has_offloaded_params,
    load_and_quantize_model,
    load_offloaded_weights,
    offload_weight,
)
from accel.utils.modeling import get_state_dict_from_offload, get_state_dict_offloaded_model
from accel.weights.state import load_quantized
from tests.accel.weights.models import Tied, inputs, net, on_meta
from tests.accel.weights.test_quantize import installed


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_offloaded_parameters_are_noticed() -> None:
    model = net()
    assert not has_offloaded_params(model[0])
    cpu_offload(model, "cpu")
    assert has_offloaded_params(model[0])
    assert not has_offloaded_params(model)
    add_hook_to_module(model[0], ModelHook(), append=True)
    assert has_offloaded_params(model[0])


def test_a_module_is_on_a_device_for_a_while() -> None:
    module = nn.Linear(2, 2)
    before, value = module.weight, module.bias.clone()
    with align_module_device(module, "meta"):
        assert module.weight.is_meta
    with align_module_device(module):
        assert module.weight is before
    assert module.weight is before
    assert torch.equal(module.bias, value)


def test_offloaded_weights_are_loaded_for_a_while() -> None:
    model = cpu_offload(net(), "cpu")
    with align_module_device(model[0].linear):
        assert torch.equal(model[0].linear.weight, net()[0].linear.weight)
    assert model[0].linear.weight.is_meta
    with align_module_device(model[0].linear, "meta"):
        assert model[0].linear.weight.is_meta
    assert torch.equal(model(inputs()), net()(inputs()))


def test_a_state_dict_has_what_is_offloaded(tmp_path: Path) -> None:
    for model in (cpu_offload(net(), "cpu"), disk_offload(net(), tmp_path, "cpu"), net()):
        assert same(get_state_dict_offloaded_model(model), net().state_dict())
    torch.manual_seed(1)
    tied = Tied().eval()
    full = {name: value.clone() for name, value in tied.state_dict().items()}
    cpu_offload(tied, "cpu", offload_buffers=True)
    assert same(get_state_dict_offloaded_model(tied), full)


def test_a_state_dict_without_data_is_refused() -> None:
    with init_empty_weights():
        model = nn.Linear(2, 2)
    with pytest.raises(StateError, match="weight"):
        get_state_dict_offloaded_model(model)


def test_weights_of_one_module_go_to_a_state_dict() -> None:
    model = cpu_offload(net(), "cpu")
    for module, name in ((model[0].linear, "0.linear.weight"), (model[1], "1.scale")):
        found = get_state_dict_from_offload(module, name, {"x": torch.ones(1)})
        assert all(torch.equal(found[n], v) for n, v in net().state_dict().items() if n in found)
        assert {"x", name} <= found.keys()
    away = get_state_dict_from_offload(model[0].linear, "w", {}, device_to_put_offload="meta")
    assert away["weight"].is_meta


def test_offloaded_weights_are_loaded_into_a_model(tmp_path: Path) -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    index = offload_weight(torch.eye(2), "0.weight", tmp_path, {})
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model[0].weight, torch.eye(2))
    assert on_meta(model) == {"0.bias", "1.weight", "1.bias"}
    load_offloaded_weights(model, None, tmp_path)


class Adapted(nn.Module):
    """A frozen base and a low-rank adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Run:
    """A training run of an adapter over an offloaded base."""

    def __init__(self, folder: Path, device_map: dict[str, Any] | None) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = Adapted()
        if device_map is not None:
            dispatch_model(model, device_map, offload_dir=folder, offload_buffers=True)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            torch.manual_seed(number)
            loss = self.model(torch.rand(3, 4)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


DISK: dict[str, Any] = {"base": "disk", "": "cpu"}


@pytest.mark.parametrize("second", [DISK, None])
@pytest.mark.parametrize("first", [DISK, None])
def test_an_adapter_of_an_offloaded_base_resumes(
    first: dict[str, Any] | None, second: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = Run(tmp_path / "first", first)
    run.steps(0, 1)
    run.accelerator.save_state(tmp_path / "state")
    losses = run.steps(2, 3, 4)
    run.accelerator.free_memory()
    resumed = Run(tmp_path / "second", second)
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.steps(2, 3, 4) == losses
    ours = get_state_dict_offloaded_model(resumed.model)
    theirs = get_state_dict_offloaded_model(run.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "base.0.weight" in on_meta(resumed.model) or second is None


@pytest.mark.parametrize("strict", [True, False])
def test_other_weights_on_disk_are_refused_with_the_remedy(strict: bool, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    other = accelerator.prepare_model(net())
    other[1].linear.weight.data.fill_(1)
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare_model(disk_offload(net(), tmp_path / "off", "cpu"))
    rule = r"1.linear.weight: offloaded .*(?<!strict=False\. )Load the checkpoint before the model"
    with pytest.raises(CheckpointError, match=rule) as caught:
        accelerator.load_state(tmp_path / "state", strict=strict)
    assert "strict=False" not in str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("assign", [True, False])
def test_a_refused_load_leaves_the_model_as_it_was(assign: bool, tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path, "cpu")
    other = {name: value + 1 for name, value in net().state_dict().items()}
    rule = r"1.scale: offloaded weights cannot .*Load them with accel.load_checkpoint_and_dispatch"
    with pytest.raises(RuntimeError, match=rule):
        model.load_state_dict(other, assign=assign)
    model.load_state_dict(net().state_dict(), assign=assign)  # buffers, which are not offloaded
    assert torch.equal(model(inputs()), net()(inputs()))


pytestmark = installed
llama = pytest.mark.skipif(
    not (is_available("transformers") and is_available("peft")),
    reason="needs transformers and peft (extra examples)",
)
WAYS = [(4, {}), (4, {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}), (8, {})]


X = torch.linspace(-1, 1, 128).reshape(2, 64)


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


class QuantizedRun:
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
    first = QuantizedRun(0, bits, given)
    first.losses(range(2))
    first.accelerator.save_state(tmp_path / "state")
    expected = first.losses(range(2, 5))
    weights = first.accelerator.get_state_dict(first.model)
    first.accelerator.save_model(first.model, tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in written.items())
    first.accelerator.free_memory()

    second = QuantizedRun(
        1, bits, given
    )  # of another base, which the checkpoint's takes the place of
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
