"""Types of the arguments of `Accelerator`, refused before anything is set up (E1, E5)."""

from __future__ import annotations

from typing import Any

import pytest

from accel import Accelerator
from accel.machine.errors import ConfigError
from accel.state import AcceleratorState, PartialState

SWITCH = "expected true or false"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *((name, "False", SWITCH) for name in ("cpu", "device_placement", "split_batches")),
        *((name, "x", SWITCH) for name in ("step_scheduler_with_optimizer", "even_batches")),
        ("dispatch_batches", "no", SWITCH),
        ("use_seedable_sampler", 2, SWITCH),
        ("dataloader_config", {"split_batches": True}, "it is a DataLoaderConfiguration"),
        ("project_config", {"project_dir": "x"}, "it is a ProjectConfiguration"),
        ("gradient_accumulation_plugin", 2, "it is a GradientAccumulationPlugin"),
        ("dynamo_plugin", "inductor", "it is a TorchDynamoPlugin"),
        ("parallelism_config", 2, "it is a ParallelismConfig"),
    ],
)
def test_an_argument_of_another_type_is_refused(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(**({"cpu": True} | {name: value}))
    (problem,) = caught.value.problems
    assert (problem.value, problem.rule) == (f"{name}={value!r}", rule)
    assert problem.remedy
    assert not PartialState._shared_state


def test_the_states_check_theirs() -> None:
    for kind in (PartialState, AcceleratorState):
        with pytest.raises(ConfigError, match="cpu='no': expected true or false"):
            kind(cpu="no")  # type: ignore[arg-type]
