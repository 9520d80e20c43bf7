"""Tensor parallelism on gloo, also with replicas and with FSDP2, trains as a plain loop does.

Holds E3.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.data import DataLoader

from accel.machine.enums import DistributedType
from accel.machine.errors import ConfigError
from tests.accel.strategies.training import (
    BATCH,
    PLAN,
    Model,
    assert_as_plain,
    build,
    data,
    largest,
    local_sizes,
    plain,
    train,
)
from tests.helpers import run_distributed

TIED = {**PLAN, "embed": "rowwise_rep", "head": "colwise_rep"}
ALIASED = {**PLAN, "embed": "embedding_rowwise", "head": "colwise_gather_output"}
Engines = tuple[dict[str, Any], dict[str, Any] | None]
WORLDS: dict[int, list[Engines]] = {
    1: [({"tp_size": 1}, None)],
    2: [
        ({"tp_size": 2}, None),
        ({"tp_size": 1}, None),
        ({"tp_size": 2}, {}),
        ({"tp_size": 2, "tp_plan": TIED}, None),
        ({"tp_size": 2, "tp_plan": ALIASED}, {"cpu_offload": True}),
    ],
}


def check_parity(world_size: int) -> None:
    for tp, fsdp in WORLDS[world_size]:
        for accumulation in (1, 2):
            accelerator = build(fsdp=fsdp, tp=tp, gradient_accumulation_steps=accumulation)
            model = Model()
            assert_as_plain(accelerator, model, Model(), accumulation, case=(tp, fsdp))
            assert model.head.weight is model.embed.weight
            accelerator.end_training()


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_is_that_of_a_plain_loop(world_size: int) -> None:
    run_distributed(check_parity, world_size, world_size)


def check_rates(accelerator: Any, model: torch.nn.Module) -> None:
    """A schedule moves on once for each share of the data, not for each process."""
    accelerator.plan.dataloader.split_batches = False
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def check_objects() -> None:
    accelerator = build(tp={"tp_size": 2})
    model = accelerator.prepare(Model())
    assert accelerator.distributed_type == DistributedType.TP
    assert accelerator.strategy.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    sizes = local_sizes(model)
    assert sizes["blocks.0.up.weight"] == (10, 8)
    assert sizes["blocks.0.up.bias"] == (10,)
    assert sizes["blocks.0.down.weight"] == (8, 10)
    assert sizes["embed.weight"] == (12, 8)
    # Ranks of one replica read the same batches; replicas read others.
    rank = accelerator.process_index
    dims = accelerator.parallel_dims
    assert (dims.dp_rank, dims.dp_size) == (rank // 2, 2)
    loader = accelerator.prepare(DataLoader(data(), BATCH))
    tokens, _ = next(iter(loader))
    assert tokens.shape[0] == BATCH // 2
    assert torch.equal(tokens, data().tensors[0][rank // 2 * 4 :][:4])
    check_rates(accelerator, model)
    accelerator.end_training()
    accelerator = build(tp={"tp_size": 2}, fsdp={})
    model = accelerator.prepare(Model())
    assert accelerator.distributed_type == DistributedType.FSDP
    assert accelerator.strategy.device_mesh.mesh_dim_names == ("dp_shard", "tp")
    assert isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], FSDPModule)
    sizes = local_sizes(model)
    assert sizes["blocks.0.up.weight"] == (5, 8)
    assert sizes["blocks.0.down.weight"] == (4, 10)
    assert sizes["embed.weight"] == (6, 8)
    dims = accelerator.parallel_dims
    assert (dims.dp_rank, dims.dp_size) == (rank // 2, 2)


def test_weights_are_sharded_and_a_replica_reads_the_same_batches() -> None:
    run_distributed(check_objects, 4)


def check_sequence_parallel(engines: dict[str, Any]) -> None:
    """Styles of torch: activations between the linear layers are sharded along the sequence."""
    replicated, sharded = (Replicate(),), (Shard(1),)
    plan = {
        "blocks.*": PrepareModuleInputOutput(
            input_layouts=replicated,
            desired_input_layouts=sharded,
            use_local_input=True,
            output_layouts=sharded,
            desired_output_layouts=replicated,
            use_local_output=True,
        ),
        "blocks.*.norm": SequenceParallel(use_local_output=True),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    accelerator = build(tp={"tp_size": 2, "tp_plan": plan}, **engines)
    assert_as_plain(accelerator, Model(), Model())


# A recomputed block gets the inputs that the hooks of its own style change again.
@pytest.mark.parametrize("engines", [{}, {"fsdp": {"activation_checkpointing": True}}])
def test_styles_of_torch_train_like_a_plain_loop(engines: dict[str, Any]) -> None:
    run_distributed(check_sequence_parallel, 2, engines)


def check_bf16() -> None:
    accelerator = build(tp={"tp_size": 2}, mixed_precision="bf16")
    losses, _, _ = train(accelerator, Model())
    assert 0.0 < largest(losses, plain(Model())[0]) < 2e-2
    accelerator.end_training()


def test_autocast() -> None:
    run_distributed(check_bf16, 2)


class Planless(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 5)


def check_foreach_steps(switch: str, optimizer_first: bool, engines: dict[str, Any]) -> None:
    accelerator = build(**engines)
    model = Model()
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, switch: True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    if optimizer_first:
        optimizer = accelerator.prepare(optimizer)
    groups = optimizer.param_groups
    assert_as_plain(accelerator, model, Model(), optimizer=optimizer)
    assert optimizer.param_groups is groups
    assert len(groups) == 1


@pytest.mark.parametrize(
    ("switch", "world_size", "engines"),
    [
        ("foreach", 2, {"tp": {"tp_size": 2}}),
        ("foreach", 2, {"fsdp": {"ignored_modules": "blocks.0"}}),
        ("fused", 2, {"tp": {"tp_size": 2}}),
        ("fused", 4, {"fsdp": {}, "tp": {"tp_size": 2}}),
    ],
)
def test_foreach_kernels_step_replicated_and_sharded_parameters(
    switch: str, world_size: int, engines: dict[str, Any]
) -> None:
    run_distributed(check_foreach_steps, world_size, switch, switch == "fused", engines)


def check_refusals() -> None:
    def refuse(match: str, model: torch.nn.Module, **plugin: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            build(tp={"tp_size": 2, **plugin}).prepare(model)

    refuse("neither the model nor the plugin has a tp_plan", Planless())
    refuse(r"\['blocks.\*.upp'\]: no module", Model(), tp_plan={"blocks.*.upp": "colwise"})
    refuse("tied weights are sharded alike", Model(), tp_plan={"head": "colwise_rep"})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build(tp={"torch_device_mesh": mesh}).prepare(Model())
    assert local_sizes(model)["blocks.0.up.weight"] == (10, 8)


def test_wrong_plans_are_refused() -> None:
    run_distributed(check_refusals, 2)


def check_layout() -> None:
    build(tp={"tp_size": 2})  # there is a process group
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    for fsdp in (None, {}):
        with pytest.raises(ConfigError, match="are consecutive"):
            build(fsdp=fsdp, tp={"torch_device_mesh": mesh})


def test_a_mesh_of_another_layout_is_refused() -> None:
    run_distributed(check_layout, 4)
