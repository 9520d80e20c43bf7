"""fp8 by torchao, emulated: equal to a loop by hand, near to fp32, under DDP, FSDP2 and compile.

Holds E3.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle
import subprocess
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.fp8 import AO_RECIPES
from accel.machine.enums import FP8BackendType
from accel.machine.errors import ConfigError
from accel.precision import fp8 as module
from accel.precision.fp8 import has_hardware, import_torchao, linear_config
from accel.utils import AORecipeKwargs, FP8RecipeKwargs, TorchDynamoPlugin
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
from tests.helpers import python, run_distributed

pytestmark = needs_torchao
CPU = torch.device("cpu")
# The unit roundoff of e4m3, which has 3 bits of mantissa: half a unit in the last place.
E4M3 = 2**-4


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


def test_a_layer_keeps_its_weights_hooks_and_mode() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model, calls = network(), []
    model.inside[0].register_forward_hook(lambda *_: calls.append(1))
    model.inside[0].mark = "mine"
    model.eval()
    weights = dict(model.named_parameters())
    model = accelerator.prepare(model)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    assert not model.inside[0].training
    assert model.inside[0].mark == "mine"
    model(batches(0, 1)[0])
    copy.deepcopy(model)(batches(0, 1)[0])
    assert calls == [1, 1]


def test_a_shared_layer_stays_shared() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = network()
    shared = model.inside[0] = torch.nn.Linear(DIM, DIM)
    model.inside.append(shared)
    model.elsewhere = torch.nn.Sequential(shared)
    model.inside[2] = torch.nn.Linear(DIM, DIM)
    model.tail = torch.nn.Linear(DIM, DIM)
    model = accelerator.prepare(model)
    assert type(model.inside[0]).__name__ == "Float8Linear"
    assert model.inside[0] is model.inside[3] is model.elsewhere[0]
    assert not model.inside[0]._forward_pre_hooks
    model(batches(0, 1)[0])


def test_a_layer_whose_forward_was_replaced_is_refused() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        kwargs_handlers=[AORecipeKwargs(module_filter_func=lambda layer, name: name == "last")],
    )
    model = network()
    model.last.forward = lambda x: x
    with pytest.raises(ConfigError, match="module_filter_func chooses last"):
        accelerator.prepare(model)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_converted_model_is_refused_in_another_format(precision: str) -> None:
    accelerator, model = prepared()
    own = accelerator.unwrap_model(model)
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
    with pytest.raises(ConfigError, match="2 of its layers were converted by an earlier"):
        Accelerator(cpu=True, mixed_precision=precision).prepare(own)


def test_layers_that_the_user_converts_stay_as_they_are() -> None:
    model = network()
    import_torchao().convert_to_float8_training(
        model,
        config=linear_config(AORecipeKwargs(), CPU),
        module_filter_fn=lambda _, name: name in CONVERTED,
    )
    before = kinds(model)
    assert kinds(Accelerator(cpu=True, mixed_precision="bf16").prepare(model)) == before


def test_an_empty_batch_has_empty_outputs_and_no_gradients() -> None:
    accelerator, model = prepared()
    for inputs in (torch.zeros(0, DIM), torch.zeros(2, 0, DIM)):
        outputs = model(inputs.requires_grad_())
        assert outputs.shape == inputs.shape
        accelerator.backward(outputs.sum())
    assert all(not parameter.grad.any() for parameter in model.parameters())
    assert model.eval()(torch.zeros(0, DIM)).dtype == torch.float32


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_blocks_share_what_is_compiled_for_one_of_them() -> None:
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", dynamo_plugin=plugin)
    blocks = [Block() for _ in range(10)]  # more than torch compiles a function for
    ends = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)
    model = accelerator.prepare(torch.nn.Sequential(ends[0], *blocks, ends[1]))
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    batch = batches(0, 1)[0]
    for _ in range(2):
        model.train()(batch).sum().backward()
        with torch.inference_mode():
            model.eval()(batch)
    # Training's, where the first block's input needs no gradient and the others' do, and
    # evaluation's.
    assert counted["unique_graphs"] - before <= 3
    torch._dynamo.reset()


def test_a_model_is_converted_once() -> None:
    accelerator, model = prepared()
    before = list(model.modules())
    accelerator.free_memory()
    again = accelerator.prepare(model)
    assert list(again.modules()) == before
    assert not again.inside[0]._forward_pre_hooks


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


# -- the config --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AO_RECIPES)
def test_each_recipe_by_its_name(name: str) -> None:
    found = linear_config(AORecipeKwargs(config=name), CPU)
    expected = import_torchao().Float8LinearConfig.from_recipe_name(name)
    assert found.emulate
    assert found.pad_inner_dim
    assert found.cast_config_input == expected.cast_config_input
    assert found.cast_config_input_for_grad_weight == expected.cast_config_input_for_grad_weight
    assert found.round_scales_to_power_of_2 == expected.round_scales_to_power_of_2


def test_a_config_of_torchao_is_taken_as_it_is_but_for_emulation() -> None:
    kind = import_torchao().Float8LinearConfig
    found = linear_config(AORecipeKwargs(config=kind(round_scales_to_power_of_2=True)), CPU)
    assert found == kind(round_scales_to_power_of_2=True, emulate=True)
    assert linear_config(AORecipeKwargs(pad_inner_dim=False), CPU) == kind(emulate=True)
    with pytest.raises(ConfigError, match="Float8LinearConfig, or the name"):
        linear_config(AORecipeKwargs(config=object()), CPU)


def test_fp8_is_emulated_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, expected in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert has_hardware(gpu) is expected
        assert linear_config(AORecipeKwargs(), gpu).emulate is not expected
    assert not has_hardware(CPU)


def test_emulation_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.logger, "_seen", set())
    accelerator, _ = prepared()
    accelerator.prepare(network())
    assert caplog.text.count("fp8 is emulated: cpu has no hardware for it") == 1


def test_weights_that_nobody_gathers_are_not_gathered_in_fp8() -> None:
    recipe = {"enable_fsdp_float8_all_gather": True}
    with pytest.raises(ConfigError, match="weights that are not sharded are not gathered"):
        prepared(recipe)


@pytest.mark.slow
def test_torchao_is_imported_without_its_messages() -> None:
    code = "from accel.precision.fp8 import import_torchao; import_torchao(); print('done')"
    found = subprocess.run(python("-c", code), capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("done\n", "")
    assert logging.getLogger("torchao").level == logging.NOTSET


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", AO_RECIPES)
def test_a_run_is_the_loop_by_hand_bit_for_bit(config: str) -> None:
    losses, weights = train({"config": config})
    expected_losses, expected = by_hand(config)
    assert losses == expected_losses
    assert set(weights) == set(expected) == set(network().state_dict())
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def first_step(recipe: dict[str, Any], device: str = "cpu") -> dict[str, float]:
    """Return relative errors, against fp32, of a converted layer's output and gradients.

    The norm of the difference over the norm, of the output [B, 64] and of both gradients. Weights
    and gradients of outputs are as small as those of a large model: without a scale they are near
    to the least numbers of the formats, or beneath them (e4m3: 2**-9, e5m2: 2**-16).
    """
    torch.manual_seed(1)
    layer, x = torch.nn.Linear(256, 64, bias=False), torch.randn(128, 256)
    layer.weight.data *= 2**-4
    gradient = torch.randn(128, 64) * 2**-17
    holder = torch.nn.Sequential(copy.deepcopy(layer)).to(device)
    chosen: dict[str, Any] = {"0": holder[0]}
    config = linear_config(AORecipeKwargs(**recipe), torch.device(device))
    module.convert_layers(holder, chosen, config)
    found: list[torch.Tensor] = []
    for model, where in ((layer, "cpu"), (holder, device)):
        inputs = x.to(where, copy=True).requires_grad_()
        with torch.autocast(where, dtype=torch.bfloat16, enabled=model is holder):
            outputs = model(inputs)
        outputs.backward(gradient.to(where, outputs.dtype))
        weight = next(model.parameters())
        assert inputs.grad is not None
        assert weight.grad is not None
        found += [tensor.detach().cpu().float() for tensor in (outputs, inputs.grad, weight.grad)]
    names = ("output", "grad_input", "grad_weight")
    return {
        name: ((found[3 + i] - found[i]).norm() / found[i].norm()).item()
        for i, name in enumerate(names)
    }


def bound(*units: float) -> float:
    """Return how far a product of matrices is from that of the factors before they were rounded.

    Rounding changes each factor by a relative error of at most its unit roundoff u, uniform over
    ±u at the worst, so u / √3 in the mean square. The errors of the k terms of a sum are
    independent: they and the sum of k independent terms both grow as √k, which cancels, and the
    relative errors of the two factors add as squares. bf16 (2**-9) of the result is beneath that.
    """
    return math.sqrt(sum(unit**2 / 3 for unit in units)) + 2**-8


# Gradients of outputs are e5m2, with 2 bits of mantissa, in the recipe of one scale a tensor.
GRADIENT = {"tensorwise": 2**-3, "rowwise": E4M3, "rowwise_with_gw_hp": E4M3}


@pytest.mark.parametrize("config", AO_RECIPES)
def test_a_layer_is_as_near_to_fp32_as_its_format_allows(config: str) -> None:
    errors = first_step({"config": config})
    gradient = GRADIENT[config]
    exact = config == "rowwise_with_gw_hp"
    assert errors["output"] < bound(E4M3, E4M3)
    assert errors["grad_input"] < bound(gradient, E4M3)
    assert errors["grad_weight"] < (bound(2**-8, 2**-8) if exact else bound(gradient, E4M3))
    assert errors["output"] > bound(E4M3, E4M3) / 4  # it is fp8 indeed, and not bf16
    assert (errors["grad_weight"] < 0.01) is exact


def test_a_scale_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = import_torchao("torchao.float8.float8_scaling_utils")
    monkeypatch.setattr(scaling, "tensor_to_scale", lambda tensor, *_: torch.ones(()))
    errors = first_step({})
    assert errors["output"] > 2 * bound(E4M3, E4M3)
    assert errors["grad_input"] > 2 * bound(2**-3, E4M3)
    assert errors["grad_weight"] > 2 * bound(2**-3, E4M3)


def test_a_head_that_is_converted_is_seen() -> None:
    _, weights = train({})
    _, right = by_hand("tensorwise")
    _, wrong = by_hand("tensorwise", (*CONVERTED, "last"))
    assert all(torch.equal(weights[name], right[name]) for name in right)
    assert not all(torch.equal(weights[name], wrong[name]) for name in wrong)


def test_training_goes_where_fp32_goes() -> None:
    losses, _ = train({})
    exact, _ = train(None)
    assert losses != exact
    # The first loss is of the same weights: two layers of the residual branch are rounded.
    assert losses[0] == pytest.approx(exact[0], rel=2 * bound(E4M3, E4M3))
    assert losses[-1] < 0.8 * losses[0]


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


# -- several processes, compile ----------------------------------------------------------------


def test_ddp_is_the_loop_by_hand_over_both_batches() -> None:
    (losses, weights), (_, other) = run_distributed(train, 2, {"config": "rowwise"})
    expected_losses, expected = by_hand("rowwise", world_size=2)
    assert losses[0] == expected_losses[0]
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    for name, weight in expected.items():
        assert torch.equal(weights[name], other[name])
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_one_graph_and_computes_the_same(backend: str) -> None:
    losses, _ = train({})
    plugin = TorchDynamoPlugin(backend=backend, fullgraph=True)
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


# -- what is refused ---------------------------------------------------------------------------


def test_an_older_recipe_of_another_library_is_not_torchaos() -> None:
    with pytest.raises(ConfigError, match="TransformerEngine"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[FP8RecipeKwargs()])


# -- on a GPU ----------------------------------------------------------------------------------


needs_hardware = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_hardware(torch.device("cuda")),
    reason="no GPU with hardware for fp8",
)


@pytest.mark.gpu
@needs_hardware
@pytest.mark.parametrize("config", AO_RECIPES)
def test_the_hardware_rounds_as_the_emulation_does(config: str) -> None:
    on_gpu, emulated = first_step({"config": config}, "cuda"), first_step({"config": config})
    for name, error in emulated.items():
        assert on_gpu[name] == pytest.approx(error, rel=0.1)


def tokens_per_second(precision: str) -> float:
    """Return the tokens a second of two compiled MLPs with the widths of a model of 7B."""
    accelerator = Accelerator(
        mixed_precision=precision,
        kwargs_handlers=[AORecipeKwargs()] if precision == "fp8" else None,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor"),
    )
    widths = (4096, 11008, 4096, 11008, 4096)
    with accelerator.device:
        model = torch.nn.Sequential(*map(torch.nn.Linear, widths[:-1], widths[1:]))
        batch = torch.randn(8192, widths[0])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for number in range(25):
        if number == 5:  # compiled, and warm
            marks[0].record()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    marks[1].record()
    torch.cuda.synchronize()
    accelerator.end_training()
    return 20 * len(batch) / (marks[0].elapsed_time(marks[1]) / 1000)


@pytest.mark.gpu
@pytest.mark.slow
@needs_hardware
def test_fp8_is_faster_than_bf16_at_the_shapes_of_7b() -> None:
    speeds = {  # in a worker, which ends with what inductor has started
        precision: run_distributed(tokens_per_second, 1, precision)[0]
        for precision in ("bf16", "fp8")
    }
    print({precision: f"{speed:,.0f} tokens/s" for precision, speed in speeds.items()})
    assert speeds["fp8"] > speeds["bf16"]
