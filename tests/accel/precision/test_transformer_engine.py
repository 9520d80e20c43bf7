"""fp8 by TransformerEngine: its layers in and out, its recipes, and its context around forwards.

On this machine a stand-in takes its place; the last test needs a GPU and the package. Holds E1, E3.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine.enums import FP8BackendType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, MissingPackageError
from accel.machine.imports import is_transformer_engine_available
from accel.plan.arguments import Arguments
from accel.plan.fp8 import Float8
from accel.plan.plan import Plan, resolve
from accel.precision.build import build_precision
from accel.precision.transformer_engine import (
    TransformerEnginePrecision,
    engine_recipe,
    scaled_layers,
)
from accel.utils import (
    FP8RecipeKwargs,
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from tests.accel.precision import engine_stand_in as engine
from tests.accel.precision.float8 import batches, network


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine seems to be installed."""
    engine.install(monkeypatch)


def kinds(model: torch.nn.Module) -> list[type]:
    return [type(m) for m in model.modules() if type(m).__name__ in ("Linear", "LayerNorm")]


def te_plan(handler: Any = None) -> Plan:
    """Return the plan of a run with TransformerEngine, which resolves on a GPU alone."""
    plan = resolve(Arguments(cpu=True, mixed_precision="bf16"), Environment())
    fp8 = Float8(FP8BackendType.TE, handler or TERecipeKwargs())
    return dataclasses.replace(plan, mixed_precision="fp8", fp8=fp8)


# -- layers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_layers_are_swapped_in_and_out_with_their_parameters() -> None:
    model = network().eval()
    parameters, expected = dict(model.named_parameters()), model(batches(0, 1)[0])
    assert not has_transformer_engine_layers(model)
    convert_model(model)
    assert kinds(model) == [
        engine.Linear, engine.LayerNorm, engine.Linear, engine.Linear, engine.Linear
    ]  # fmt: skip
    assert has_transformer_engine_layers(model)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert not any(module.training for module in model.modules())
    assert torch.equal(model(batches(0, 1)[0]), expected)
    convert_model(model, to_transformer_engine=False)
    assert kinds(model) == [
        torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Linear, torch.nn.Linear, torch.nn.Linear
    ]  # fmt: skip
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert not has_transformer_engine_layers(model)
    assert torch.equal(model(batches(0, 1)[0]), expected)


@pytest.mark.usefixtures("installed")
def test_kinds_of_layers_are_left_on_request() -> None:
    model = network()
    convert_model(model, _convert_linear=False)
    assert kinds(model).count(engine.LayerNorm) == 1
    assert engine.Linear not in kinds(model)
    model = network()
    convert_model(model, _convert_ln=False)
    assert kinds(model).count(engine.Linear) == 4
    assert engine.LayerNorm not in kinds(model)


@pytest.mark.skipif(is_transformer_engine_available(), reason="TransformerEngine is installed")
def test_without_the_package_they_say_what_to_install() -> None:
    for function in (convert_model, has_transformer_engine_layers):
        with pytest.raises(MissingPackageError, match=r"transformer-engine\[pytorch\]"):
            function(network())


@pytest.mark.usefixtures("installed")
def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "autocast")
    with pytest.raises(ConfigError, match=r"release 2\.9"):
        convert_model(network())


# -- recipes -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_delayed_scaling_is_mapped() -> None:
    handler = TERecipeKwargs(
        margin=1, fp8_format="E4M3", amax_history_len=16, amax_compute_algo="max"
    )
    expected = {
        "margin": 1,
        "fp8_format": engine.Format.E4M3,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
    }
    assert engine_recipe(handler).fields == expected
    assert engine_recipe().fields["amax_compute_algo"] == "most_recent"
    fields = engine_recipe(FP8RecipeKwargs(backend="te", margin=2)).fields
    assert (fields["margin"], fields["fp8_format"]) == (2, engine.Format.HYBRID)


@pytest.mark.usefixtures("installed")
def test_block_scaling() -> None:
    handler = TERecipeKwargs(use_mxfp8_block_scaling=True)
    assert isinstance(engine_recipe(handler), engine.MXFP8BlockScaling)
    assert engine_recipe(handler).fields["fp8_format"] is engine.Format.E4M3
    other = FP8RecipeKwargs(use_mxfp8_block_scaling=True, margin=1, fp8_format="E5M2")
    assert engine_recipe(other).fields == {"margin": 1, "fp8_format": engine.Format.E5M2}
    with pytest.raises(ConfigError, match="amax_history_len=16"):
        engine_recipe(TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=16))


# -- autocast ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_a_forward_computes_in_fp8_while_it_trains() -> None:
    model, recipe = network(), engine_recipe()
    convert_model(model)
    for use_during_eval in (False, True):
        forward = contextual_fp8_autocast(model.forward, recipe, use_during_eval)
        assert forward.__wrapped__ == model.forward
        wrapped = types.MethodType(forward, model)
        for training in (True, False):
            engine.SEEN.clear()
            wrapped(batches(0, 1)[0]) if model.train(training) else None
            assert 5 * [(training or use_during_eval, recipe)] == engine.SEEN


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("handler", "evaluates"),
    [(None, False), (TERecipeKwargs(use_autocast_during_eval=True, margin=3), True)],
)
def test_a_model_is_wrapped(handler: TERecipeKwargs | None, evaluates: bool) -> None:
    model = network()
    convert_model(model)
    assert apply_fp8_autowrap(model, fp8_recipe_handler=handler) is model
    twin = copy.deepcopy(model).eval()
    assert model(batches(0, 1)[0]).dtype == torch.float32
    (found,) = {(enabled, recipe.fields["margin"]) for enabled, recipe in engine.SEEN}
    assert found == (True, 3 if evaluates else 0)
    engine.SEEN.clear()
    twin(batches(0, 1)[0])  # a copy is in a mode of its own
    assert {enabled for enabled, _ in engine.SEEN} == {evaluates}


@pytest.mark.usefixtures("installed")
def test_a_prepared_model_computes_under_both_contexts() -> None:
    precision = build_precision(te_plan(TERecipeKwargs(margin=2)))
    assert isinstance(precision, TransformerEnginePrecision)
    model = network()
    precision.convert(model)
    precision.wrap_forward(model)
    assert kinds(model) == [
        torch.nn.Linear, torch.nn.LayerNorm, engine.Linear, engine.Linear, torch.nn.Linear
    ]  # fmt: skip
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    hidden: list[torch.dtype] = []
    model.inside.register_forward_hook(lambda *found: hidden.append(found[2].dtype))
    outputs = model(batches(0, 1)[0])
    assert (outputs.dtype, hidden) == (torch.float32, [torch.bfloat16])
    assert [(enabled, recipe.fields["margin"]) for enabled, recipe in engine.SEEN] == [
        (True, 2),
        (True, 2),
    ]
    model.eval()(batches(0, 1)[0])
    assert [enabled for enabled, _ in engine.SEEN[2:]] == [False, False]


def te_run(plain: torch.nn.Module | None = None) -> tuple[Accelerator, Any, Any]:
    """Return a run whose layers are the stand-in's, on the CPU: its plan resolves on GPUs alone."""
    accelerator = Accelerator(cpu=True)
    accelerator.strategy.precision = build_precision(te_plan())
    model = plain or network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def te_train(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
    losses = []
    for number, batch in enumerate(batches(0)):
        loss = model(batch / (number + 1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("installed")
def test_a_resumed_run_has_the_scales_of_the_saved_one(tmp_path: Path) -> None:
    own = te_run()
    te_train(*own)
    own[0].save_state(str(tmp_path / "state"))
    expected = te_train(*own)
    resumed = te_run()
    resumed[0].load_state(str(tmp_path / "state"))
    assert te_train(*resumed) == expected
    lacking = te_run()  # the control: weights and optimizer alone
    lacking[1].load_state_dict(own[1].state_dict())
    lacking[0].load_state(str(tmp_path / "state"))
    for layer in scaled_layers(lacking[1]).values():
        layer.fp8_meta = {}
    assert te_train(*lacking) != expected


@pytest.mark.usefixtures("installed")
def test_scales_in_a_checkpoint_are_no_pickle(tmp_path: Path) -> None:
    model = network()
    convert_model(model)
    for layer in scaled_layers(model).values():
        del layer._state_dict_hooks, layer._load_state_dict_pre_hooks  # as a user builds it
        layer._state_dict_hooks, layer._load_state_dict_pre_hooks = OrderedDict(), OrderedDict()
    accelerator, model, optimizer = te_run(model)
    te_train(accelerator, model, optimizer)
    assert not [name for name in model.state_dict() if name.endswith("_extra_state")]
    accelerator.save_state(str(tmp_path / "state"))
    saved = torch.load(tmp_path / "state" / "fp8_scales.bin", weights_only=True)
    assert set(saved) == {"first", "inside.0", "inside.2", "last"}
    for entries in saved.values():
        assert set(entries) == {"amax_history_fwd", "extra_fp8_variables"}
    # A foreign file's bytes never reach a layer, which would unpickle them.
    hostile = torch.frombuffer(bytearray(b"cos\nsystem\n"), dtype=torch.uint8)
    state = model.state_dict()
    name = next(iter(scaled_layers(model)))
    model.load_state_dict({**state, f"{name}._extra_state": hostile})


@pytest.mark.usefixtures("installed")
def test_it_computes_on_gpus_alone() -> None:
    with pytest.raises(ConfigError, match=r"on cpu.*CUDA devices alone.*AORecipeKwargs"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and is_transformer_engine_available()),
    reason="needs a GPU and TransformerEngine",
)
def test_a_run_on_a_gpu_is_near_to_bf16() -> None:
    losses = {}
    for precision in ("bf16", "fp8"):
        handlers = [TERecipeKwargs()] if precision == "fp8" else None
        accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert precision == "bf16" or has_transformer_engine_layers(model)
        losses[precision] = []
        for batch in batches(0):
            loss = model(batch.to(accelerator.device)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[precision].append(loss.item())
        accelerator.end_training()
        accelerator.state._reset_state(reset_partial_state=True)
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.05)
