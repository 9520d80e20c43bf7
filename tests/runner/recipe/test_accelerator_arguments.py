"""C1: what the engine, the machine and the environment refuse is found before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from runner.recipe import accelerator_arguments
from runner.recipe.accelerator_arguments import environment_conflicts
from runner.recipe.schema import Precision, Recipe
from tests.runner.recipe.test_diagnose import refused

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_environment_does_not_decide_what_a_recipe_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",  # of an engine that is off: it changes nothing
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines = refused("distributed=multi_cpu", "fsdp=full_shard", capsys=capsys)
    del variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"]
    assert [line.partition("=")[0].partition(" ")[0] for line in lines] == list(variables)
    assert "Unset it, and choose deepspeed=…." in lines[0]


def test_variables_that_agree_with_the_recipe_are_no_problem() -> None:
    recipe = Recipe(precision=Precision(mode="bf16"))
    assert environment_conflicts(recipe, Environment()) == []
    variables = {"ACCELERATE_DYNAMO_BACKEND": "no"}
    agreeing = Environment(mixed_precision="bf16", variables=variables)
    assert environment_conflicts(recipe, agreeing) == []
    (only,) = environment_conflicts(recipe, Environment(mixed_precision="fp16"))
    assert only.value == "ACCELERATE_MIXED_PRECISION=fp16 (environment)"


def test_an_engine_with_master_weights_refuses_weights_in_bf16() -> None:
    bf16 = Precision(mode="bf16", weights="bf16")
    found = accelerator_arguments.problems(
        Recipe(precision=bf16, deepspeed=DeepSpeedPlugin(zero_stage=2))
    )
    assert "precision.weights=bf16 with deepspeed=" in str(found)
    assert not accelerator_arguments.problems(Recipe(precision=bf16))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"weights": "bf16"}, "precision.weights=bf16 with precision.mode=no"),
        ({"mode": "fp16", "weights": "bf16"}, "with precision.mode=fp16"),
        ({"mode": "bf16", "weights": "fp16"}, "Precision.weights='fp16': it is one of bf16"),
    ],
)
def test_weights_that_do_not_fit_the_precision_is_refused(
    values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Precision(**values)
    assert problem in str(refused.value)
