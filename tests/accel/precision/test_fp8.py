"""fp8 by torchao, emulated: equal to a loop by hand, near to fp32, under DDP, FSDP2 and compile.

Holds E3.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.fp8 import AO_RECIPES
from accel.machine.enums import FP8BackendType
from accel.machine.errors import ConfigError
from accel.precision.fp8 import has_hardware, linear_config
from accel.utils import AORecipeKwargs, TorchDynamoPlugin
from tests.accel.precision.float8 import (
    CONVERTED,
    DIM,
    batches,
    by_hand,
    needs_torchao,
    network,
    resume,
    train,
)

pytestmark = needs_torchao
CPU = torch.device("cpu")


def prepared(recipe: dict[str, Any] | None = None) -> tuple[Accelerator, Any]:
    handlers = [AORecipeKwargs(**recipe)] if recipe is not None else None
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
    return accelerator, accelerator.prepare(network())


def kinds(model: torch.nn.Module) -> dict[str, str]:
    return {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


# -- what is converted -------------------------------------------------------------------------


def test_the_first_and_last_layers_stay_and_the_run_says_what_it_computes_in() -> None:
    accelerator, model = prepared()
    assert kinds(model) == {
        "first": "Linear",
        **dict.fromkeys(CONVERTED, "Float8Linear"),
        "last": "Linear",
    }
    assert accelerator.fp8_backend is FP8BackendType.AO
    assert accelerator.fp8_recipe_handler == AORecipeKwargs()
    assert accelerator.mixed_precision == accelerator.state.mixed_precision == "fp8"
    outputs = model(batches(0, 1)[0])
    assert outputs.dtype == torch.float32
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_filter_chooses_layers_by_module_and_name() -> None:
    seen = {}

    def chosen(layer: torch.nn.Module, name: str) -> bool:
        seen[name] = layer
        return name == "last"

    _, model = prepared({"module_filter_func": chosen})
    assert kinds(model)["last"] == "Float8Linear"
    assert list(kinds(model).values()).count("Float8Linear") == 1
    assert set(seen) == {"first", "last", *CONVERTED}


def test_a_model_that_is_a_layer_is_refused_and_one_without_layers_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        kwargs_handlers=[AORecipeKwargs(module_filter_func=lambda layer, name: not name)],
    )
    with pytest.raises(ConfigError, match=r"the model itself.*torch.nn.Sequential"):
        accelerator.prepare(torch.nn.Linear(DIM, DIM))
    accelerator.prepare(network())
    assert "no layer of Net is converted" in caplog.text


# -- the config --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.spectral_norm]
)
def test_a_layer_whose_weight_is_computed_is_refused_and_nothing_converted(change: Any) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        kwargs_handlers=[AORecipeKwargs(module_filter_func=lambda layer, name: True)],
    )
    model = torch.nn.Sequential(torch.nn.Linear(DIM, DIM), change(torch.nn.Linear(DIM, DIM)))
    kinds = [type(layer) for layer in model]
    with pytest.raises(ConfigError, match=r"chooses 1: .*Leave it out in module_filter_func"):
        accelerator.prepare(model)
    assert [type(layer) for layer in model] == kinds


def test_fp8_is_emulated_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, expected in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert has_hardware(gpu) is expected
        assert linear_config(AORecipeKwargs(), gpu).emulate is not expected
    assert not has_hardware(CPU)


def test_weights_that_nobody_gathers_are_not_gathered_in_fp8() -> None:
    recipe = {"enable_fsdp_float8_all_gather": True}
    with pytest.raises(ConfigError, match="weights that are not sharded are not gathered"):
        prepared(recipe)


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", AO_RECIPES)
def test_a_run_is_the_loop_by_hand_bit_for_bit(config: str) -> None:
    losses, weights = train({"config": config})
    expected_losses, expected = by_hand(config)
    assert losses == expected_losses
    assert set(weights) == set(expected) == set(network().state_dict())
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


# -- several processes, compile ----------------------------------------------------------------


@pytest.mark.parametrize("config", AO_RECIPES)
def test_evaluation_computes_the_same_in_each_mode(config: str) -> None:
    accelerator, model = prepared({"config": config})
    model.eval()
    (batch,) = batches(0, 1)
    expected = model(batch).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(model(batch), expected)
    whole = pickle.loads(pickle.dumps(accelerator.unwrap_model(model, keep_fp32_wrapper=False)))
    with accelerator.autocast():
        assert torch.equal(whole(batch).float(), expected)


def test_a_compiled_model_is_one_graph_and_computes_the_same() -> None:
    losses, _ = train({})
    plugin = TorchDynamoPlugin(backend="aot_eager", fullgraph=True)
    compiled, _ = train({}, dynamo_plugin=plugin)
    assert compiled == pytest.approx(losses, rel=1e-2)
    torch.compiler.reset()


# -- checkpoints -------------------------------------------------------------------------------


def test_a_state_goes_from_fp8_to_fp32_and_back(tmp_path: Any) -> None:
    _, weights = train({}, folder=str(tmp_path))
    exact = resume(str(tmp_path), None)
    assert all(torch.equal(exact[name], weights[name]) for name in weights)
    _, weights = train(None, folder=str(tmp_path / "exact"))
    rounded = resume(str(tmp_path / "exact"), {})
    assert all(torch.equal(rounded[name], weights[name]) for name in weights)


def test_a_saved_model_is_one_of_torch(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    accelerator, model = prepared()
    accelerator.save_model(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    network().load_state_dict(saved)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
