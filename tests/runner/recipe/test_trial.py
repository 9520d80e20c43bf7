"""Shipped factories are tried on stand-ins before the start."""

from __future__ import annotations

from runner.recipe import parts
from tests.runner.recipe.test_parts import recipe


def test_a_schedule_that_fails_at_its_first_step_names_its_keys() -> None:
    wrong = recipe(scheduler={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 0})
    (only,) = parts.try_factories(wrong)
    assert "scheduler.step_size=0: ZeroDivisionError" in str(only)
    for right in ({"name": "cosine"}, {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}):
        assert parts.try_factories(recipe(scheduler=right)) == []
