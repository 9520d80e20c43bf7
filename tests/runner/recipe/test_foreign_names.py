"""Names of other tools, and the sentence that helps."""

from __future__ import annotations

import pytest

from runner.recipe import foreign_names, keys
from runner.recipe.schema import Recipe

KNOWN = [*keys.typed_keys(), "optimizer.lr"]


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("lr", "Did you mean 'optimizer.lr'?"),
        ("trainer.max_epochs", "Did you mean 'trainer.epochs'?"),
        ("trainer.accelerator", "Choose distributed=multi_gpu, or distributed.device=cuda."),
        ("trainer.epochs", None),
        ("trainer.unknown", None),
    ],
)
def test_the_name_of_another_tool_has_a_remedy(key: str, sentence: str | None) -> None:
    assert foreign_names.remedy(key, KNOWN) == sentence


def test_every_remedy_is_a_key_of_the_schema() -> None:
    for target in foreign_names._KEYS.values():
        assert target in KNOWN or target.startswith("optimizer."), target
    for group in foreign_names._OPTIONS:
        assert hasattr(Recipe(), group)


def test_options_and_plugins() -> None:
    assert foreign_names.option("precision", "BFloat16") == "bf16"
    assert foreign_names.option("precision", 16) == "fp16"
    assert foreign_names.option("precision", "bf16") is None
    problem = foreign_names.plugin("hydra/launcher", "joblib")
    assert problem is not None
    assert "pip install hydra-joblib-launcher" in problem.remedy
    assert foreign_names.plugin("hydra/launcher", "basic") is None
