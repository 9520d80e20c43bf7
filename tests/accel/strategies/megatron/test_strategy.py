"""Training under Megatron is that of a plain loop, with megatron-core's own objects (R1, E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from accel import LocalSGD
from accel.checkpoint.optimizer_state import ParameterNames
from accel.config.handlers import GradScalerKwargs
from accel.machine.errors import CheckpointError, ConfigError
from tests.accel.strategies.megatron.training import (
    CLOSE,
    MAX_NORM,
    MICRO_BATCHES,
    Trained,
    batch_of,
    build_model,
    build_optimizer,
    data,
    loss_of,
    plain,
    started,
    train,
)
from tests.helpers import run_distributed

pytestmark = pytest.mark.slow
SHARDED = {"use_distributed_optimizer": True}
TP = {"tp_degree": 2}
PP = {"pp_degree": 2}


def under_megatron(
    fields: dict[str, Any], kind: str, padded: bool, data_rank: int | None
) -> Trained:
    with started(fields) as accelerator:
        model = build_model(kind)
        model, optimizer = accelerator.prepare(model, build_optimizer(model))
        losses, norms = train(accelerator, model, optimizer, data(), padded, data_rank)
        return losses, norms, accelerator.get_state_dict(model)


def agrees(
    world_size: int,
    fields: dict[str, Any],
    kind: str = "llama",
    padded: bool = False,
    data_rank: int | None = None,
) -> bool:
    """Return whether losses, norms and weights are those of the plain loop."""
    expected = plain(kind, padded)
    for found in run_distributed(under_megatron, world_size, fields, kind, padded, data_rank):
        same = found[0] == pytest.approx(expected[0], rel=CLOSE)
        same = same and found[1] == pytest.approx(expected[1], rel=1e-5)
        same = same and found[2].keys() == expected[2].keys()
        weights = ((found[2][name], value) for name, value in expected[2].items())
        if not same or not all(torch.allclose(a, b, atol=1e-4) for a, b in weights):
            return False
    return True


@pytest.mark.parametrize(
    ("world_size", "fields", "kind"),
    [
        (1, {}, "llama"),
        (1, {}, "mistral"),
        (1, {"recompute_granularity": "full"}, "gpt2"),
        (1, {"recompute_activations": True}, "llama"),
        (2, TP, "llama"),
        (2, TP, "tied"),
        (2, {**TP, "sequence_parallelism": True}, "gpt2"),
        (2, {**TP, "sequence_parallelism": True}, "llama"),
        (2, {}, "llama"),
        (2, SHARDED, "gpt2"),
        (2, PP, "llama"),
        (2, PP, "tied"),
        (4, {**TP, **SHARDED}, "llama"),
        (4, {**TP, **PP}, "gpt2"),
    ],
)
def test_training_is_that_of_a_plain_loop(
    world_size: int, fields: dict[str, Any], kind: str
) -> None:
    assert agrees(world_size, fields, kind)


@pytest.mark.parametrize(("kind", "fields"), [("llama", TP), ("mistral", PP), ("gpt2", TP)])
def test_padding_is_hidden_and_has_no_loss(kind: str, fields: dict[str, Any]) -> None:
    assert agrees(2, fields, kind, padded=True)


def test_a_rank_that_reads_the_data_of_another_is_found() -> None:
    assert not agrees(2, {}, data_rank=0)


def by_hand(fields: dict[str, Any]) -> Trained:
    with started(fields) as accelerator:
        model = build_model()
        model, optimizer = accelerator.prepare(model, build_optimizer(model))
        with pytest.raises(ConfigError, match="hold and update the full model"):
            LocalSGD(accelerator, model, 2)
        dims, losses, norms = accelerator.parallel_dims, [], []
        for step in data():
            for tokens in step:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch_of(tokens.chunk(dims.dp_size)[dims.dp_rank]))
                    accelerator.backward(loss)
                    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    if accelerator.sync_gradients:
                        norms.append(float(norm))
                    optimizer.step()
                    optimizer.zero_grad()
        means = [sum(pair) / MICRO_BATCHES for pair in zip(losses[::2], losses[1::2], strict=True)]
        return means, norms, accelerator.get_state_dict(model)


@pytest.mark.parametrize("fields", [TP, {}, SHARDED])
def test_a_loop_by_hand_trains_alike(fields: dict[str, Any]) -> None:
    losses, norms, weights = plain()
    for found in run_distributed(by_hand, 2, fields):
        assert found[0] == pytest.approx(losses, rel=CLOSE)
        assert found[1] == pytest.approx(norms, rel=1e-5)
        assert all(torch.allclose(found[2][n], value, atol=1e-4) for n, value in weights.items())


def check_objects(fields: dict[str, Any], optimizer_kind: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    with started(fields) as accelerator:
        given = build_model()
        model, optimizer = accelerator.prepare(given, build_optimizer(given))
        assert isinstance(model.chunk, DistributedDataParallel)
        assert isinstance(model.core, GPTModel)
        qkv = model.core.decoder.layers[0].self_attention.linear_qkv
        assert isinstance(qkv, ColumnParallelLinear)
        (engine,) = optimizer.engine.chained_optimizers
        assert type(engine).__name__ == optimizer_kind
        assert type(engine.optimizer) is torch.optim.AdamW
        dims = accelerator.parallel_dims
        assert parallel_state.get_data_parallel_rank() == dims.dp_rank
        assert parallel_state.get_tensor_model_parallel_rank() == dims.coordinates["tp"]
        assert parallel_state.get_pipeline_model_parallel_rank() == dims.coordinates["pp"]
        assert accelerator.distributed_type == "MEGATRON_LM"
        assert accelerator.unwrap_model(model) is given
        assert all(parameter.is_meta for parameter in given.parameters())
        counted = sum(parameter.numel() for parameter in model.parameters())
        assert counted < sum(parameter.numel() for parameter in given.parameters())


@pytest.mark.parametrize(
    ("world_size", "fields", "kind"),
    [
        (2, TP, "FP32Optimizer"),
        (2, PP, "FP32Optimizer"),
        (4, {**TP, **SHARDED}, "DistributedOptimizer"),
    ],
)
def test_the_objects_are_those_of_megatron(
    world_size: int, fields: dict[str, Any], kind: str
) -> None:
    run_distributed(check_objects, world_size, fields, kind)


def held_bytes(fields: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of parameters and of optimizer state that a rank holds after a step."""
    with started(fields) as accelerator:
        model = build_model()
        model, optimizer = accelerator.prepare(model, build_optimizer(model))
        train(accelerator, model, optimizer, data()[:1])
        (engine,) = optimizer.engine.chained_optimizers
        states = [one for state in engine.optimizer.state.values() for one in state.values()]
        moments = [one for one in states if one.dim() > 0]
        return sum(p.nbytes for p in model.parameters()), sum(one.nbytes for one in moments)


@pytest.mark.parametrize(("fields", "parameters"), [(TP, 0.51), (PP, 0.51), (SHARDED, 1.0)])
def test_a_rank_holds_its_part(fields: dict[str, Any], parameters: float) -> None:
    whole = run_distributed(held_bytes, 1, {})[0]
    for found in run_distributed(held_bytes, 2, fields):
        print(fields, found, whole)
        assert found[0] <= parameters * whole[0]
        assert found[1] <= 0.51 * whole[1]


def evaluated(fields: dict[str, Any]) -> tuple[float, torch.Tensor, torch.Tensor | None]:
    with started(fields) as accelerator:
        model = build_model()
        model = accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        with torch.no_grad():
            odd = data()[0, 0, :, :11]
            of_targets = (
                model(input_ids=odd, targets=odd)["nats"] if "tp_degree" in fields else None
            )
            loss = loss_of(model, batch_of(odd, padded=True))
            return float(loss), model(input_ids=odd).logits, of_targets


@pytest.mark.parametrize("fields", [TP, PP, {**TP, "sequence_parallelism": True}])
def test_evaluation_gives_loss_and_logits_on_every_rank(fields: dict[str, Any]) -> None:
    model = build_model().eval()
    with torch.no_grad():
        odd = data()[0, 0, :, :11]
        expected = float(model(**batch_of(odd, padded=True)).loss), model(odd).logits
    nats = torch.nn.functional.cross_entropy(expected[1].mT, odd, reduction="none")
    for loss, logits, of_targets in run_distributed(evaluated, 2, fields):
        assert loss == pytest.approx(expected[0], rel=CLOSE)
        assert torch.allclose(logits, expected[1], atol=1e-5)
        assert of_targets is None or torch.allclose(of_targets, nats, atol=1e-5)


def in_half_precision(
    fields: dict[str, Any], precision: str
) -> tuple[list[float], set[torch.dtype]]:
    with started(fields, mixed_precision=precision) as accelerator:
        model = build_model()
        model, optimizer = accelerator.prepare(model, build_optimizer(model))
        before = accelerator.get_state_dict(model)
        given = build_model().state_dict()
        assert all(torch.equal(before[name], value) for name, value in given.items())  # in fp32
        losses, _ = train(accelerator, model, optimizer, data())
        return losses, {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize(
    ("fields", "precision"), [(TP, "bf16"), (SHARDED, "bf16"), (TP, "fp16"), (PP, "fp16")]
)
def test_half_precision_trains_copies_in_fp32(fields: dict[str, Any], precision: str) -> None:
    for losses, dtypes in run_distributed(in_half_precision, 2, fields, precision):
        assert losses == pytest.approx(plain()[0], rel=5e-3 if precision == "bf16" else 1e-3)
        assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float16}


def check_overflow() -> None:
    scale = GradScalerKwargs(init_scale=2.0**40)
    with started({}, mixed_precision="fp16", kwargs_handlers=[scale]) as accelerator:
        model = build_model()
        model, optimizer = accelerator.prepare(model, build_optimizer(model))
        before = accelerator.get_state_dict(model)
        accelerator.backward(loss_of(model, batch_of(data()[0, 0])))
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == float("inf")
        optimizer.step()
        assert optimizer.step_was_skipped
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    run_distributed(check_overflow, 1)


def exported(folder: str) -> None:
    with started(TP) as accelerator:
        model = build_model("tied")
        model, optimizer = accelerator.prepare(model, build_optimizer(model))
        train(accelerator, model, optimizer, data()[:1])
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            folder,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=state,
        )
        accelerator.wait_for_everyone()


def test_weights_leave_as_a_model_of_transformers(tmp_path: Any) -> None:
    from transformers import LlamaForCausalLM

    run_distributed(exported, 2, str(tmp_path))
    given = build_model("tied")
    found = LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = data()[0, 0]
    before, after = (float(loss_of(one, batch_of(tokens)).detach()) for one in (given, found))
    assert after < before


def check_fields() -> None:
    fields = {
        "attention_dropout": 0.25,
        "hidden_dropout": 0.5,
        "recompute_granularity": "full",
        "recompute_num_layers": 2,
        "gradient_clipping": 1e-9,
        "other_megatron_args": {"deallocate_pipeline_outputs": True},
    }
    with started(fields) as accelerator:
        model = build_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        config = model.core.config
        assert (config.attention_dropout, config.hidden_dropout) == (0.25, 0.5)
        assert (config.recompute_method, config.recompute_num_layers) == ("uniform", 2)
        assert config.deallocate_pipeline_outputs is True
        accelerator.forward_backward(model, [batch_of(data()[0, 0])], loss_of)
        optimizer.step()
        (engine,) = optimizer.engine.chained_optimizers
        largest = max(float(state["exp_avg"].abs().max()) for state in engine.state.values())
        assert 0 < largest < 1e-9  # the gradients were clipped
    with started({"recompute_activations": True}) as accelerator:
        model = accelerator.prepare_model(build_model(), evaluation_mode=True)
        assert model.core.config.recompute_granularity == "selective"


def test_fields_reach_the_configuration_of_megatron() -> None:
    run_distributed(check_fields, 1)


def check_refusals() -> None:
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({"other_megatron_args": {"num_layers": 1, "no_such": 1}}, {}, "no_such, num_layers"),
        ({}, {"maximize": True}, "no maximize"),
    )
    for fields, options, words in cases:
        with started(fields) as accelerator:
            model = build_model()
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            with pytest.raises(ConfigError, match=words):
                accelerator.prepare(model, optimizer)
    with started({}) as accelerator:
        experts = build_core()
        experts.config.num_moe_experts = 2
        with pytest.raises(ConfigError, match="num_moe_experts=2 of a given model: it is None"):
            accelerator.prepare(experts)
    with pytest.raises(ConfigError, match="=2 with MegatronLMPlugin"):
        started({"num_micro_batches": 3}).__enter__()
    with started({"num_micro_batches": 2}) as accelerator:
        model = build_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with accelerator.accumulate(model):  # the window is open: nothing is reduced yet
            accelerator.backward(loss_of(model, batch_of(data()[0][0])))
            assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch_of(data()[0][0])))
            assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0
        batch = batch_of(data()[0][0])
        with pytest.raises(ConfigError, match="num_items_in_batch=…, shift_labels=…"):
            model(**batch, shift_labels=batch["labels"], num_items_in_batch=44, return_dict=True)
        with pytest.raises(ConfigError, match="output_hidden_states"):
            model(input_ids=batch["input_ids"], output_hidden_states=True)
        with pytest.raises(ConfigError, match=r"Give input_ids=…\."):
            model(batch["input_ids"], labels=batch["labels"])
        whole = model(input_ids=batch["input_ids"]).logits
        assert model(input_ids=batch["input_ids"], logits_to_keep=1).logits.equal(whole[:, -1:])
        with pytest.raises(ConfigError, match=r"accelerator\.save_state"):
            optimizer.state_dict()
        optimizer.step()
        names, state = ParameterNames([model.plain]), accelerator.strategy.state
        saved = state.optimizer_state(optimizer, names)
        next(iter(saved["state"].values()))["average"] = torch.zeros(1)
        saved["param_groups"][0].pop("betas")
        with pytest.raises(CheckpointError, match="unexpected: average, betas"):
            state.load_optimizer_state(optimizer, saved, names)


def test_what_megatron_would_compute_otherwise_is_refused() -> None:
    run_distributed(check_refusals, 1)


def build_core(pre_process: bool = True, post_process: bool = True) -> Any:
    """Return a GPT of megatron-core as a user builds one."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import (
        get_pipeline_model_parallel_world_size,
        get_tensor_model_parallel_world_size,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    from accel.strategies.megatron.build import ScaledDotProductAttention

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    sizes = {"vocab_size": 64, "max_sequence_length": 16}
    return GPTModel(config, spec, pre_process=pre_process, post_process=post_process, **sizes)


def core_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss: torch.Tensor = model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean()
    return loss


def train_core(
    fields: dict[str, Any], is_provided: bool, steps: slice, source: str | None, target: str | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    if is_provided:
        fields = {**fields, "custom_model_provider_function": build_core}
    with started(fields) as accelerator:
        model = torch.nn.Linear(1, 1) if is_provided else build_core()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if source is not None:
            accelerator.load_state(source)
        losses = []
        for step in data()[steps]:
            found = accelerator.forward_backward(model, list(step), core_loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(torch.stack(found).mean()))
        if target is not None:
            accelerator.save_state(target)
        return losses, accelerator.get_state_dict(model)


@pytest.mark.parametrize("is_provided", [True, False])
def test_a_module_of_megatron_trains_as_it_is(tmp_path: Any, is_provided: bool) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected, weights = run_distributed(train_core, 1, {}, is_provided, slice(0, 3), None, None)[0]
    begun, _ = run_distributed(train_core, 2, TP, is_provided, slice(0, 1), None, first)[0]
    fields = PP if is_provided else {}
    middle, _ = run_distributed(train_core, 2, fields, is_provided, slice(1, 2), first, second)[0]
    ended, found = run_distributed(train_core, 1, {}, is_provided, slice(2, 3), second, None)[0]
    assert found.keys() == weights.keys()
    assert [*begun, *middle, *ended] == pytest.approx(expected, rel=CLOSE)


def check_frozen() -> None:
    with started({}) as accelerator:
        model = build_model()
        model.model.embed_tokens.weight.requires_grad_(False)
        model.model.layers[0].self_attn.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.1))
        train(accelerator, model, optimizer, data()[:1])
        same = {
            n for n, v in accelerator.get_state_dict(model).items() if torch.equal(v, before[n])
        }
        assert same == {n for n in before if "embed" in n or "layers.0.self_attn" in n}
        half = build_model()
        half.model.layers[0].self_attn.q_proj.requires_grad_(False)
        with pytest.raises(ConfigError, match="Freeze all of them, or none"):
            accelerator.prepare(half)
        half, whole = build_model(), build_model()
        with pytest.raises(ConfigError, match="is in one group of the optimizer"):
            accelerator.prepare(half, torch.optim.AdamW(list(half.parameters())[:3]))
        with pytest.raises(ConfigError, match="SGD under Megatron"):
            accelerator.prepare(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="Linear under Megatron"):
            accelerator.prepare(torch.nn.Linear(1, 1))


def test_frozen_weights_stay_and_what_cannot_be_trained_is_refused() -> None:
    run_distributed(check_frozen, 1)
