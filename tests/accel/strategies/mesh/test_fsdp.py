"""FSDP2 on gloo: the same training as a plain loop, on 1, 2 and 4 processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from accel.enums import DistributedType
from accel.errors import ConfigError
from accel.strategies.mesh.grad_scaler import ShardedStepScaler
from tests.accel.strategies.training import (
    BATCH,
    Model,
    adamw,
    build,
    data,
    difference,
    largest,
    local_sizes,
    loss_of,
    plain,
    steps_of,
    train,
)
from tests.helpers import run_distributed

CLOSE = 1e-5
BF16 = 2e-2
VARIANTS: list[dict[str, Any]] = [
    {"reshard_after_forward": True, "forward_prefetch": True},
    {"reshard_after_forward": False, "activation_checkpointing": True},
    {"reshard_after_forward": 2, "min_num_params": 100},
    {"dp_replicate_size": 2},
    {"dp_replicate_size": "all"},
    {"cpu_offload": True, "auto_wrap_policy": "no_wrap"},
]


def check_parity(plugin: dict[str, Any], accumulation: int = 1) -> None:
    accelerator = build(fsdp=plugin, gradient_accumulation_steps=accumulation)
    losses, norms, weights = train(accelerator, Model())
    expected = plain(Model(), accumulation)
    assert largest(losses, expected[0]) < CLOSE
    assert largest(norms, expected[1]) < CLOSE
    assert difference(weights, expected[2]) < CLOSE
    accelerator.end_training()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_is_that_of_a_plain_loop(world_size: int, accumulation: int) -> None:
    run_distributed(check_parity, world_size, {}, accumulation)


def check_variants() -> None:
    for plugin in VARIANTS:
        check_parity(plugin)
        check_parity(plugin, 2)


@pytest.mark.slow  # the parity matrix has them, too
def test_every_way_of_sharding_trains_alike() -> None:
    run_distributed(check_variants, 4)


# -- what is in place ----------------------------------------------------------------------


def check_objects() -> None:
    accelerator = build(fsdp={})
    model = Model()
    optimizer = adamw(model)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    rank = accelerator.process_index
    assert accelerator.distributed_type == DistributedType.FSDP
    assert prepared is model
    assert isinstance(model, FSDPModule)
    assert [isinstance(module, FSDPModule) for module in model.blocks] == [True, True]
    assert not isinstance(model.embed, FSDPModule)
    parameters = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) for p in parameters.values())
    assert all(p.placements == (Shard(0),) for p in parameters.values())
    sizes = local_sizes(model)
    assert sizes["embed.weight"] == (3, 8)
    assert sizes["blocks.0.up.weight"] == (5, 8)
    assert sizes["shift"] == ((2,), (2,), (1,), (0,))[rank]
    assert model.head.weight is model.embed.weight
    held = [p for group in wrapped.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model


def test_parameters_are_shards_that_the_optimizer_holds() -> None:
    run_distributed(check_objects, 4)


def check_replicas() -> None:
    accelerator = build(fsdp={"dp_replicate_size": 2})
    model = accelerator.prepare(Model())
    assert accelerator.strategy.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    assert local_sizes(model)["embed.weight"] == (6, 8)
    assert "parameters" in accelerator.strategy.state.sharded
    assert model.embed.weight.placements == (Replicate(), Shard(0))
    accelerator.end_training()
    accelerator = build(fsdp={"dp_replicate_size": "all"})
    assert local_sizes(accelerator.prepare(Model()))["embed.weight"] == (12, 8)
    assert accelerator.strategy.state.sharded == ()


def test_replicas_of_a_sharded_model_hold_more() -> None:
    run_distributed(check_replicas, 4)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def check_trigger() -> None:
    tokens, targets = data().tensors
    accelerator = build(fsdp={})
    model = accelerator.prepare(Model())
    shards = list(model.parameters())
    rank, size = accelerator.process_index, accelerator.num_processes
    losses = []
    for index in range(2):
        mine = slice((index * size + rank) * 4, (index * size + rank + 1) * 4)
        with accelerator.no_sync(model):
            losses.append(loss_of(model, tokens[mine], targets[mine]))
            if index == 0:
                accelerator.backward(losses[0])
                assert all(shard.grad is None for shard in shards)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    expected = Model()
    for index in range(2):
        both = slice(index * size * 4, (index + 1) * size * 4)
        loss_of(expected, tokens[both], targets[both]).backward()
    assert difference(gradients_of(model), gradients_of(expected)) < CLOSE


@pytest.mark.parametrize("world_size", [1, 2])
def test_trigger_sync_exchanges_what_was_accumulated(world_size: int) -> None:
    run_distributed(check_trigger, world_size)


# -- preparing -----------------------------------------------------------------------------


def check_orders() -> None:
    expected = plain(Model())[2]

    def with_state() -> tuple[Any, Any]:
        model = Model()
        optimizer = adamw(model)
        tokens, targets = data().tensors
        loss_of(model, tokens[:8], targets[:8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def started() -> dict[str, torch.Tensor]:
        model, optimizer = with_state()
        for tokens, targets in DataLoader(data(), BATCH):
            loss_of(model, tokens, targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    for order in ("together", "optimizer first", "model first", "after", "with state"):
        accelerator = build(fsdp={})
        model, optimizer = with_state() if order == "with state" else (Model(), None)
        optimizer = optimizer or adamw(model)
        if order in ("together", "with state"):
            model, optimizer = accelerator.prepare(model, optimizer)
        elif order == "optimizer first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        else:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(adamw(model) if order == "after" else optimizer)
        loader = accelerator.prepare(DataLoader(data(), BATCH))
        steps_of(accelerator, model, optimizer, loader)
        target = started() if order == "with state" else expected
        assert difference(accelerator.get_state_dict(model), target) < CLOSE, order
        accelerator.end_training()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_order_of_preparing_does_not_matter(world_size: int) -> None:
    run_distributed(check_orders, world_size)


def check_loading() -> None:
    expected = plain(Model())
    for plugin in ({"cpu_ram_efficient_loading": True}, {"dp_replicate_size": "all"}):
        accelerator = build(fsdp=plugin)
        if accelerator.is_main_process:
            model = Model()
        else:  # nothing is allocated here
            with torch.device("meta"):
                model = Model(seed=9)
        losses, _, weights = train(accelerator, model)
        assert largest(losses, expected[0]) < CLOSE
        assert difference(weights, expected[2]) < CLOSE
        assert model.head.weight is model.embed.weight
        accelerator.end_training()
    # Without meta devices, all start from the weights of rank 0, too.
    accelerator = build(fsdp={})
    model = accelerator.prepare(Model(seed=accelerator.process_index))
    assert difference(accelerator.get_state_dict(model), Model().state_dict()) == 0.0
    accelerator.end_training()
    check_own_weights()
    check_nowhere()


def check_own_weights() -> None:
    accelerator = build(fsdp={"sync_module_states": False})
    rank, size = accelerator.process_index, accelerator.num_processes
    model = accelerator.prepare(Model(seed=rank))
    own = Model(seed=rank).embed.weight.chunk(size)[rank]
    assert torch.equal(model.embed.weight.to_local(), own)
    with torch.device("cpu" if rank == 0 else "meta"):
        other = Model()
    with pytest.raises(ConfigError, match=r"sync_module_states=False .* on ranks \[1\]"):
        accelerator.prepare(other)
    accelerator.end_training()


def check_nowhere() -> None:
    accelerator = build(fsdp={})
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ConfigError, match="meta device on rank 0"):
        accelerator.prepare(model)
    accelerator.end_training()

    def init(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            torch.nn.init.constant_(tensor, 0.25)

    accelerator = build(fsdp={"param_init_fn": init})
    state = accelerator.get_state_dict(accelerator.prepare(model))
    assert all(bool((value == 0.25).all()) for value in state.values())
    accelerator.end_training()


def test_weights_come_from_rank_0() -> None:
    run_distributed(check_loading, 2)


# -- precision -----------------------------------------------------------------------------


def check_bf16(plugin: dict[str, Any], arguments: dict[str, Any]) -> None:
    accelerator = build(fsdp=plugin, **arguments)
    model = accelerator.prepare(Model())
    seen = []
    model.blocks[0].up.register_forward_hook(
        lambda module, inputs, output: seen.append((module.weight.dtype, output.dtype))
    )
    output = model(torch.zeros(2, 4, dtype=torch.long))
    accelerator.backward(output.sum())
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert output.dtype == torch.float32
    assert model.embed.weight.dtype == torch.float32
    assert model.embed.weight.grad.dtype == torch.float32
    accelerator.end_training()
    accelerator = build(fsdp=plugin, **arguments)
    losses, _, _ = train(accelerator, Model())
    gap = largest(losses, plain(Model())[0])
    assert 0.0 < gap < BF16
    accelerator.end_training()


def check_formats() -> None:
    check_bf16({}, {"mixed_precision": "bf16"})
    check_bf16({"mixed_precision_policy": "bf16"}, {"mixed_precision": "no"})
    policy = MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    check_bf16({"mixed_precision_policy": policy}, {"mixed_precision": "no"})
    fields = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "fp32"}
    check_bf16({"mixed_precision_policy": fields}, {"mixed_precision": "bf16"})
    buffers = {"mixed_precision_policy": {"buffer_dtype": "bf16"}}
    accelerator = build(fsdp=buffers, mixed_precision="no")
    assert accelerator.prepare(Model()).scale.dtype == torch.bfloat16
    accelerator.end_training()
    half = {"mixed_precision_policy": "fp16"}
    with pytest.raises(ConfigError, match="they disagree"):
        build(fsdp=half, mixed_precision="bf16")
    # Nothing of that is left. The policy settles the precision, and fp16 has its scaler.
    accelerator = build(fsdp=half, mixed_precision="no")
    assert accelerator.mixed_precision == "fp16"
    assert isinstance(accelerator.scaler, ShardedStepScaler)
    accelerator.end_training()
    # What a policy leaves open is as the run says.
    check_bf16({"mixed_precision_policy": {"reduce_dtype": "bf16"}}, {"mixed_precision": "bf16"})


def test_the_engine_owns_bf16() -> None:
    run_distributed(check_formats, 2)


# -- wrong use -----------------------------------------------------------------------------


def check_refusals() -> None:
    def refuse(match: str, plugin: dict[str, Any], model: torch.nn.Module | None = None) -> None:
        with pytest.raises(ConfigError, match=match):
            build(fsdp=plugin).prepare(Model() if model is None else model)

    refuse(
        "'Blok': no model of this call has such a class; there are Block, .*Did you mean 'Block'",
        {"transformer_cls_names_to_wrap": ["Blok"]},
    )
    # One of several models may have none of the blocks.
    accelerator = build(fsdp={"transformer_cls_names_to_wrap": ["Block"]})
    model, other = accelerator.prepare(Model(), torch.nn.Linear(2, 2))
    assert [isinstance(module, FSDPModule) for module in (model.blocks[0], other)] == [True, True]
    assert accelerator.prepare(model) is model
    accelerator.end_training()
    refuse(
        "model names no blocks",
        {"auto_wrap_policy": "transformer_based_wrap"},
        torch.nn.Linear(2, 2),
    )
    refuse("ignored_modules: 'bloks'", {"ignored_modules": ["bloks"]})
    refuse("one unit", {"activation_checkpointing": True, "auto_wrap_policy": "no_wrap"})
    refuse("dp_replicate_size=3", {"dp_replicate_size": 3})
    refuse("reshard_after_forward=2", {"reshard_after_forward": 2})
    accelerator = build(fsdp={})
    model = accelerator.prepare(Model())
    accelerator.backward(loss_of(model, *data().tensors))
    with pytest.raises(ConfigError, match="clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with (
        pytest.raises(ConfigError, match="even_batches"),
        accelerator.join_uneven_inputs([model]),
    ):
        pass


def test_wrong_use_is_refused() -> None:
    run_distributed(check_refusals, 2)


def check_norms() -> None:
    accelerator, expected = build(fsdp={}), Model()
    model = accelerator.prepare(Model())
    tokens, targets = data().tensors
    accelerator.backward(loss_of(model, tokens, targets))
    loss_of(expected, tokens, targets).backward()
    for order in (1.0, 2.0, 3.0, float("inf")):
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9, order)
        target = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e9, order)
        assert abs(norm.item() - target.item()) < CLOSE
    assert accelerator.clip_grad_norm_([], 1.0).item() == 0.0
    if accelerator.num_processes > 1:  # one that holds no gradient is not waited for
        parameters = list(model.parameters())
        gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
        if not accelerator.is_main_process:
            model.zero_grad()
            gradients = []
        local = sum((g.square().sum() for g in gradients), torch.zeros(()))
        target = accelerator.reduce(local, "sum").sqrt()
        assert abs((accelerator.clip_grad_norm_(parameters, 1e9) - target).item()) < CLOSE


@pytest.mark.parametrize("world_size", [1, 4])
def test_norms_of_every_order(world_size: int) -> None:
    run_distributed(check_norms, world_size)


def check_norms_of_little() -> None:
    accelerator = build(fsdp={})
    tokens = torch.zeros(2, 4, dtype=torch.long)
    for dtype in (torch.float64, torch.bfloat16):
        model, expected = Model(frozen=False).to(dtype), Model(frozen=False).to(dtype)
        accelerator.prepare(model)
        accelerator.backward(model(tokens).square().mean())
        expected(tokens).square().mean().backward()
        # Five elements on four ranks: the last one holds none.
        norm = accelerator.clip_grad_norm_([model.shift], 1e9)
        target = expected.shift.grad.norm()
        assert abs(norm.item() / target.item() - 1.0) < BF16
    accelerator.end_training()


def test_norms_of_what_some_ranks_hold_nothing_of() -> None:
    run_distributed(check_norms_of_little, 4)
