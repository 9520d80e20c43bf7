"""Errors of the engine in the words of a recipe."""

from __future__ import annotations

import pytest

from accel.errors import ConfigError, Problem
from runner.wording import of_the_recipe, translated


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DeepSpeedPlugin(zero_stage=3) with it", "deepspeed.zero_stage=3 with it"),
        ("FullyShardedDataParallelPlugin.dp_replicate_size=3", "fsdp.dp_replicate_size=3"),
        (
            "Give TorchTensorParallelPlugin(tp_plan={'up': 'colwise', …}, tp_size=2).",
            "Give tensor_parallel.tp_plan={'up': 'colwise', …}, tensor_parallel.tp_size=2.",
        ),
        ("GradientAccumulationPlugin(num_steps=2)", "trainer.accumulation.num_steps=2"),
        ("Accelerator(mixed_precision='bf16')", "precision=bf16"),
        ("a DeepSpeedPlugin for each", "a DeepSpeedPlugin for each"),
        ("ProfileKwargsX(a=1)", "ProfileKwargsX(a=1)"),
    ],
)
def test_constructors_become_keys(text: str, expected: str) -> None:
    assert translated(text) == expected


def test_an_error_keeps_its_kind_and_its_cause() -> None:
    told = Problem("DeepSpeedPlugin(zero_stage=3)", "it is alone", "Take it out.")
    with pytest.raises(ConfigError, match=r"^deepspeed\.zero_stage=3: it is alone") as error:
        with of_the_recipe():
            raise ConfigError(told)
    assert isinstance(error.value.__cause__, ConfigError)
    untouched = ConfigError(Problem("trainer.epochs=0", "at least 1", "Give more."))
    with pytest.raises(ConfigError) as error:
        with of_the_recipe():
            raise untouched
    assert error.value is untouched
