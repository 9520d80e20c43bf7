"""Errors of the engine in the words of a recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accel.machine.errors import CheckpointError, ConfigError, DiskFullError, Problem
from runner.recipe.error_keys import CALLS, of_the_recipe, translated


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
        (
            "Set precision.fp8_torchao.x=m.f, in a script AORecipeKwargs(x=f).",
            "Set precision.fp8_torchao.x=m.f.",
        ),
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


def test_remedies_of_checkpoints_are_in_the_words_of_a_recipe() -> None:
    text = "checkpoint 'x': it is there. Set ProjectConfiguration(iteration=…) to a free number."
    with pytest.raises(DiskFullError, match=r"Set checkpoint\.project\.iteration=… to a free"):
        with of_the_recipe():
            raise DiskFullError(text)
    with pytest.raises(CheckpointError) as error:
        with of_the_recipe():
            raise CheckpointError(f"weights do not fit. {CALLS[0][0]}")
    assert str(error.value) == f"weights do not fit. {CALLS[0][1]}"


def test_every_remedy_that_is_a_call_of_a_script_has_one_of_a_recipe() -> None:
    """Each remedy that is translated is really said by the engine, word for word."""
    root = Path(__file__).resolve().parents[3] / "accel" / "checkpoint"
    said = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in root.glob("*.py")
    )
    for words, instead in CALLS:
        assert words in said, words
        assert not re.search(r"strict=|load_state|save_state|ProjectConfiguration", instead)
