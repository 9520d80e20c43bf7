"""One factory of a recipe: which function it is, and its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.recipe.registry import register
from runner.training import build
from tests.runner.training.test_build import problems, recipe


def test_nested_targets_are_built(registered: None) -> None:
    @register.model("holder_a")
    def holder(inner: Any, size: int = 1) -> torch.nn.Module:
        assert isinstance(inner["layers"][0], torch.nn.Linear)
        return torch.nn.Sequential(*inner["layers"])

    layers = [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}]
    model = {"name": "holder_a", "inner": {"layers": layers}}
    step = build.build_step(recipe(model=model))
    assert step.models["model"][0].out_features == 3  # type: ignore[index,union-attr]


def test_nested_targets_are_checked(registered: None) -> None:
    register.model("holder_b")(lambda inner: torch.nn.Identity())
    found = problems(
        model={"name": "holder_b", "inner": [{"_target_": "os.system", "command": ""}]}
    )
    assert len(found) == 1
    assert "model.inner[0]._target_=os.system: the package 'os' is not trusted" in found[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"name": "cnm"}}, "model.name='cnm': no model factory has that name. Did you"),
        (
            {"model": {"name": "cnn", "widht": 3}},
            "model.widht=3: cnn has no such argument. Did you",
        ),
        ({"model": {"name": "cnn", "width": "wide"}}, "model.width='wide': it is of type int"),
        ({"model": {"name": "cnn", "_args_": [1]}}, "model._args_=[1]: cnn has no such argument"),
        ({"model": {"width": 3}}, "nothing is chosen"),
        ({"model": {"name": "cnn", "_target_": "torch.nn.Linear"}}, "not both"),
        ({"model": "cnn"}, "Write model.name=cnn"),
        ({"model": {"_target_": "torch.nn.Linear", "in_features": 1}}, "Linear needs it"),
        ({"model": {"_target_": "wine.MLP"}}, 'imports = ["wine"]'),
        ({"optimizer": {"name": "adamw", "model": 1}}, "adamw has no such argument"),
        ({"optimizer": {"_target_": "torch.optim.SGD", "params": 1}}, "SGD has no such argument"),
        ({"scheduler": {"name": "cosine", "num_steps": 1}}, "cosine has no such argument"),
        ({"callbacks": {"early_stoping": {}}}, "callbacks.early_stoping.name='early_stoping'"),
        ({"callbacks": ["early_stopping"]}, "it maps names to factories"),
        ({"data": None}, "data=null: a run needs it"),
        ({"step": None}, "step=null: a run needs it"),
        ({"model": None}, "model=null with step=supervised: supervised needs a model"),
        ({"step": {"name": "supervised", "model": 1}}, "supervised has no such argument"),
    ],
)
def test_a_wrong_reference_is_named(changes: dict[str, Any], expected: str) -> None:
    (only,) = problems(**changes)
    assert expected in only
