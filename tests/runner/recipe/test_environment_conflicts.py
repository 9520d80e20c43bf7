"""Environment variables that contradict a recipe."""

from __future__ import annotations

import pytest

from accel.machine.env import Environment
from runner.recipe.environment_conflicts import problems
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
    assert problems(recipe, Environment()) == []
    assert problems(recipe, Environment(mixed_precision="bf16", dynamo_backend="no")) == []
    (only,) = problems(recipe, Environment(mixed_precision="fp16"))
    assert only.value == "ACCELERATE_MIXED_PRECISION=fp16 (environment)"
