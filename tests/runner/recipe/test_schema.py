"""The schema: what it refuses, how problems name their place, and the three forms of a recipe.

Holds C1.
"""

from __future__ import annotations

from typing import Any

import pytest

from runner.recipe import serialization


def problems(plain: dict[str, Any]) -> list[str]:
    _, found = serialization.examine(plain)
    return [str(problem) for problem in found]


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ({"trainer": {"epochs": None}}, "trainer.epochs=null with trainer.max_steps=null"),
        ({"trainer": {"max_time": "soon"}}, "trainer.max_time='soon'"),
        ({"trainer": {"rng_types": ["trch"]}}, "Did you mean 'torch'?"),
        ({"precision": {"mode": "bf61"}}, "precision.mode='bf61'"),
        ({"precision": {"mode": "bf16", "fp8_te": {}}}, "Choose precision=fp8_te"),
        (
            {"precision": {"mode": "fp8", "fp8_te": {}, "fp8_torchao": {}}},
            "precision.mode=fp8 with fp8_torchao and fp8_te",
        ),
        ({"distributed": {"kind": "multi_cup"}}, "Did you mean 'multi_cpu'?"),
        ({"distributed": {"ddp": {"comm_hook": "fp61"}}}, "distributed.ddp.comm_hook='fp61'"),
        ({"dataloader": {"prefetch_factor": 2}}, "dataloader.prefetch_factor=2 with num_workers=0"),
        ({"tracker": {"init_kwargs": {"wandb": {}}}}, "tracker.init_kwargs.wandb"),
        ({"fsdp": {"dp_replicate_size": 0}}, "fsdp.dp_replicate_size=0"),
        ({"deepspeed": {"zero_stage": 4}}, "deepspeed.zero_stage=4"),
        ({"fsdp": {}, "deepspeed": {}}, "fsdp= and deepspeed= are both on"),
        (
            {"deepspeed": {}, "tensor_parallel": {}},
            "Switch one off: tensor_parallel=null or deepspeed=null.",
        ),
        ({"name": "a/b"}, "name='a/b'"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(plain: dict[str, Any], expected: str) -> None:
    (only,) = problems(plain)
    assert expected in only


def test_everything_wrong_is_told_at_once() -> None:
    found = problems(
        {
            "trainer": {"epochs": -1, "log_every": 0, "accumulation": {"num_steps": 0}},
            "precision": {"mode": "bf61"},
            "seed": -1,
            "extra": 1,
        }
    )
    assert len(found) == 6


def test_a_recipe_with_problems_keeps_what_is_right() -> None:
    found, wrong = serialization.examine(
        {"seed": -1, "model": {"name": "x"}, "trainer": {"epochs": 3}}
    )
    assert len(wrong) == 1
    assert found.model == {"name": "x"}
    assert found.trainer.epochs == 3
