"""A mesh: its dimensions, its precision, and numbers that do not divide (E3, E5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.parallelism import one_of_each
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import TorchDynamoPlugin
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problems
from accel.plan.arguments import Arguments, choose
from accel.strategies.mesh.spec import SPEC
from accel.strategies.spec import Request

FOUR = Environment(world_size=4, local_world_size=4)


def sizes(plugins: dict[str, Any], environment: Environment = FOUR) -> tuple[int, int, int]:
    """Return replicas, shards and tensor-parallel ranks."""
    dims = SPEC.dims(plugins, environment, one_of_each())
    return dims.dp_replicate, dims.dp_shard, dims.tp


def test_dimensions() -> None:
    fsdp, parallel = FullyShardedDataParallelPlugin(), TorchTensorParallelPlugin(2)
    nodes = FullyShardedDataParallelPlugin(dp_replicate_size="nodes")
    assert sizes({"fsdp": fsdp}) == (1, 4, 1)
    assert sizes({"tensor_parallel": parallel}) == (2, 1, 2)
    assert sizes({"fsdp": fsdp, "tensor_parallel": parallel}) == (1, 2, 2)
    assert sizes({"fsdp": nodes}, replace(FOUR, local_world_size=2)) == (2, 2, 1)
    with pytest.raises(ConfigError, match="tp_size=3 with 4 processes"):
        sizes({"tensor_parallel": TorchTensorParallelPlugin(3)})


@pytest.mark.parametrize(
    ("fields", "tp_size", "wrong"),
    [
        ({"reshard_after_forward": 2}, 1, False),
        ({"reshard_after_forward": 2}, 2, True),
        ({"reshard_after_forward": 4}, 1, True),
        ({"reshard_after_forward": 3}, 1, True),
        ({"reshard_after_forward": 2, "dp_replicate_size": 2}, 1, True),
        ({"dp_replicate_size": "nodes"}, 1, False),
        ({"dp_replicate_size": "all"}, 2, False),
        ({"dp_replicate_size": 4}, 2, True),
    ],
)
def test_shards_divide_the_processes(fields: dict[str, Any], tp_size: int, wrong: bool) -> None:
    plugins = {
        "fsdp_plugin": FullyShardedDataParallelPlugin(**fields),
        "torch_tp_plugin": None if tp_size == 1 else TorchTensorParallelPlugin(tp_size),
    }
    found = Problems()
    choose(Arguments.of(plugins), FOUR, "cpu", found).dims(FOUR, found)
    assert bool(found) is wrong


def test_the_policy_implies_the_precision_where_none_is_requested() -> None:
    half = {"fsdp": FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")}
    full = {"fsdp": FullyShardedDataParallelPlugin(mixed_precision_policy="fp32")}
    assert [SPEC.precision(half, given) for given in (None, "no", "fp16")] == [
        "bf16",
        "bf16",
        "fp16",
    ]
    assert [SPEC.precision(full, given) for given in (None, "no", "bf16")] == [None, "no", "bf16"]


@pytest.mark.parametrize(
    ("policy", "precision", "wrong"),
    [
        ("bf16", "bf16", False),
        ("fp16", "bf16", True),
        ("bf16", "fp8", False),  # layers that are not converted compute in bf16
        ("fp16", "fp8", True),
        (None, "fp8", False),
    ],
)
def test_the_policy_and_the_precision_agree(
    policy: str | None, precision: str, wrong: bool
) -> None:
    plugins = {"fsdp": FullyShardedDataParallelPlugin(mixed_precision_policy=policy)}
    request = Request(plugins, FOUR, "cpu", precision, TorchDynamoPlugin())
    assert bool(SPEC.problems(request)) is wrong
