"""FSDP2 on gloo: the same training as a plain loop, on 1, 2 and 4 processes (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from accel.machine.enums import DistributedType
from accel.machine.errors import ConfigError
from tests.accel.strategies.training import (
    Model,
    adamw,
    assert_as_plain,
    build,
    data,
    difference,
    local_sizes,
    loss_of,
)
from tests.helpers import run_distributed


def check_parity(plugin: dict[str, Any], accumulation: int = 1) -> None:
    accelerator = build(fsdp=plugin, gradient_accumulation_steps=accumulation)
    assert_as_plain(accelerator, Model(), Model(), accumulation)
    accelerator.end_training()


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_training_is_that_of_a_plain_loop(world_size: int, accumulation: int) -> None:
    run_distributed(check_parity, world_size, {}, accumulation)


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


# -- evaluation and placement --------------------------------------------------------------


class Unmoved(Model):
    """A model that refuses to be moved."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("moved")


def check_evaluated(engines: dict[str, Any]) -> None:
    accelerator = build(**engines)
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = Model()
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert difference(accelerator.get_state_dict(model), Model().state_dict()) == 0.0
    tokens, targets = data(1).tensors
    expected = Model()(tokens)
    with torch.no_grad(), CommDebugMode() as mode:
        assert torch.equal(model(tokens), expected)
    assert mode.get_total_counts() == 0
    # Another model is trained beside it.
    other = Model()
    other, optimizer = accelerator.prepare(other, adamw(other))
    accelerator.backward(loss_of(other, tokens, targets))
    optimizer.step()
    assert difference(model.state_dict(), Model().state_dict()) == 0.0
    check_not_trained(accelerator, model)
    accelerator.end_training()


def check_not_trained(accelerator: Any, model: torch.nn.Module) -> None:
    """Gradients of an evaluated model are not averaged, so that an optimizer refuses them."""
    if accelerator.parallel_dims.grad_size == 1:
        optimizer = accelerator.prepare(adamw(model))
        accelerator.backward(loss_of(model, *data(1).tensors))
        optimizer.step()
        return
    with pytest.raises(ConfigError, match="of a model prepared for evaluation"):
        accelerator.prepare(adamw(model))


def check_evaluated_in_bf16() -> None:
    accelerator = build(fsdp={}, mixed_precision="bf16")
    model = accelerator.prepare_model(Model(), evaluation_mode=True)
    seen = []
    model.blocks[0].up.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    assert model(torch.zeros(2, 4, dtype=torch.long)).dtype == torch.float32
    assert seen == [torch.bfloat16]
    accelerator.end_training()


def check_placement(engines: dict[str, Any]) -> None:
    accelerator = build(**engines)
    with pytest.raises(ConfigError, match=r"device_placement=False for a model with (fsdp|tp)"):
        accelerator.prepare_model(Model(), device_placement=False)
    accelerator.prepare_model(Unmoved(), device_placement=False, evaluation_mode=True)
    with pytest.raises(AssertionError, match="moved"):
        accelerator.prepare_model(Unmoved(), evaluation_mode=True)
    accelerator.end_training()


def check_evaluation() -> None:
    for engines in ({"fsdp": {}}, {"tp": {"tp_size": 2}}, {"tp": {"tp_size": 1}}):
        check_evaluated(engines)
        check_placement(engines)
    check_evaluated_in_bf16()


def test_an_evaluated_model_is_full_on_every_rank_and_a_trained_one_is_placed() -> None:
    run_distributed(check_evaluation, 2)


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
    with pytest.raises(ConfigError, match="even_batches"), accelerator.join_uneven_inputs([model]):
        pass


def test_wrong_use_is_refused() -> None:
    run_distributed(check_refusals, 2)
