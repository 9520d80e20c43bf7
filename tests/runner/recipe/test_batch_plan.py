"""Batch arithmetic and its refusals (R1, C1)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.config.training import GradientAccumulationPlugin
from accel.machine.errors import ConfigError
from runner.recipe.batch_plan import plan_batches
from runner.recipe.schema import Trainer


def trainer(**fields) -> Trainer:
    steps = fields.pop("num_steps", None)
    return Trainer(accumulation=GradientAccumulationPlugin(num_steps=steps), **fields)


@settings(max_examples=300)
@given(
    st.integers(1, 100),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.none(), st.integers(1, 6)),
    st.integers(1, 8),
)
def test_a_plan_multiplies_to_the_global_batch_or_names_a_size_that_would(
    total: int, micro: int | None, steps: int | None, processes: int
) -> None:
    wanted = trainer(global_batch_size=total, micro_batch_size=micro, num_steps=steps)
    try:
        plan = plan_batches(wanted, processes, None)
    except ConfigError as error:
        sizes = re.findall(r"Set trainer.global_batch_size=(\d+)(?: or (\d+))?", str(error))[0]
        for size in filter(None, sizes):
            wanted.global_batch_size = int(size)
            plan_batches(wanted, processes, None)
        return
    assert plan.global_batch == total == plan.micro_batch * plan.accumulation * processes
    assert micro in (None, plan.micro_batch)
    assert steps in (None, plan.accumulation)
    assert plan.round_size == plan.micro_batch * processes


def test_the_micro_batch_is_as_large_as_possible() -> None:
    plan = plan_batches(trainer(global_batch_size=64), 2, 1257)
    assert (plan.micro_batch, plan.accumulation, plan.eval_batch) == (32, 1, 64)
    assert (plan.steps_per_epoch, plan.total_steps) == (20, 20)
    assert plan_batches(trainer(eval_batch_size=7), 1, None).eval_batch == 7


@pytest.mark.parametrize(
    ("fields", "steps", "total"),
    [
        ({}, 13, 13),
        ({"drop_last": True}, 12, 12),
        ({"epochs": 3}, 13, 39),
        ({"epochs": 3, "max_steps": 20}, 13, 20),
        ({"epochs": None, "max_steps": 50}, 13, 50),
        ({"limit_train_batches": 5}, 5, 5),
        ({"limit_train_batches": 500}, 13, 13),
        ({"limit_train_batches": 0.5}, 6, 6),
        ({"limit_train_batches": 0.001}, 1, 1),
        ({"overfit_batches": 2, "epochs": 4}, 2, 8),
        ({"overfit_batches": 4, "limit_train_batches": 3}, 3, 3),
    ],
)
def test_steps(fields: dict, steps: int, total: int) -> None:
    plan = plan_batches(trainer(global_batch_size=8, **fields), 2, 97)
    assert (plan.steps_per_epoch, plan.total_steps) == (steps, total)


def test_a_stream_of_unknown_length_ends_by_max_steps_alone() -> None:
    assert plan_batches(trainer(epochs=2), 1, None).total_steps is None
    assert plan_batches(trainer(epochs=2, max_steps=7), 1, None).total_steps == 7


@pytest.mark.parametrize(
    ("fields", "processes", "samples", "message"),
    [
        ({"global_batch_size": 10}, 4, None, r"=10 with 4 processes: .* 4.*=8 or 12\."),
        ({"global_batch_size": 2}, 4, None, r"Set trainer.global_batch_size=4\."),
        (
            {"global_batch_size": 10, "micro_batch_size": 4},
            1,
            None,
            r"1 process and trainer.micro_batch_size=4.*=8 or 12\.",
        ),
        ({"global_batch_size": 10, "num_steps": 4}, 1, None, r"num_steps=4.*=8 or 12\."),
        (
            {"global_batch_size": 10, "micro_batch_size": 2, "num_steps": 3},
            2,
            None,
            r"it is their product.*=12",
        ),
        ({"drop_last": True}, 1, 63, r"63 training samples.*drop_last=false"),
        ({}, 1, 0, r"not empty"),
    ],
)
def test_refusals(fields: dict, processes: int, samples: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_batches(trainer(**fields), processes, samples)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_batches(trainer(global_batch_size=10, drop_last=True), 3, 4)
    assert len(caught.value.problems) == 2
