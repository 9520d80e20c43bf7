"""FSDP2 on gloo: the same training as a plain loop, on 1, 2 and 4 processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accel.strategies.training import Model, build, difference, largest, plain, train
from tests.helpers import run_distributed

CLOSE = 1e-5


def check_parity(plugin: dict[str, Any], accumulation: int = 1) -> None:
    accelerator = build(fsdp=plugin, gradient_accumulation_steps=accumulation)
    losses, norms, weights = train(accelerator, Model())
    expected = plain(Model(), accumulation)
    assert largest(losses, expected[0]) < CLOSE
    assert largest(norms, expected[1]) < CLOSE
    assert difference(weights, expected[2]) < CLOSE
    accelerator.end_training()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_is_that_of_a_plain_loop(world_size: int) -> None:
    run_distributed(check_parity, world_size, {})


VARIANTS: list[dict[str, Any]] = [
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True, "dp_replicate_size": 2},
    {"dp_replicate_size": "all"},
    {"cpu_offload": True},
    {"activation_checkpointing": True, "forward_prefetch": True},
    {"auto_wrap_policy": "no_wrap"},
    {"min_num_params": 100},
    {"reshard_after_forward": 2},
]


@pytest.mark.parametrize("plugin", VARIANTS, ids=str)
def test_x(plugin) -> None:
    run_distributed(check_parity, 4, plugin)

@pytest.mark.parametrize("world_size", [1, 2])
def test_y(world_size) -> None:
    run_distributed(check_parity, world_size, {"dp_replicate_size": "all"}, 2)

@pytest.mark.parametrize("plugin", VARIANTS[:5], ids=str)
def test_acc(plugin) -> None:
    run_distributed(check_parity, 4, plugin, 2)
