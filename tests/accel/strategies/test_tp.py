"""Tensor parallelism on gloo: alone, with replicas, and with FSDP2, as a plain loop trains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accel.strategies.training import Model, build, difference, largest, plain, train
from tests.helpers import run_distributed

CLOSE = 1e-5


def check_parity(
    tp: dict[str, Any], fsdp: dict[str, Any] | None = None, accumulation: int = 1
) -> None:
    accelerator = build(fsdp=fsdp, tp=tp, gradient_accumulation_steps=accumulation)
    losses, norms, weights = train(accelerator, Model())
    expected = plain(Model(), accumulation)
    assert largest(losses, expected[0]) < CLOSE
    assert largest(norms, expected[1]) < CLOSE
    assert difference(weights, expected[2]) < CLOSE
    accelerator.end_training()


@pytest.mark.parametrize(
    ("world_size", "tp", "fsdp"),
    [
        (1, {"tp_size": 1}, None),
        (2, {"tp_size": 2}, None),
        (2, {"tp_size": 1}, None),
        (4, {"tp_size": 4}, None),
        (4, {"tp_size": 2}, None),
        (4, {"tp_size": 2}, {}),
        (4, {"tp_size": 2}, {"dp_replicate_size": 2}),
        (2, {"tp_size": 2}, {}),
    ],
)
def test_training_is_that_of_a_plain_loop(
    world_size: int, tp: dict[str, Any], fsdp: dict[str, Any] | None
) -> None:
    run_distributed(check_parity, world_size, tp, fsdp)
