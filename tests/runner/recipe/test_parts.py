"""From a recipe to objects: which parts fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel.machine.errors import ConfigError
from runner.recipe import parts
from runner.recipe.registry import register
from runner.recipe.schema import Recipe, Trainer
from runner.training.callback import Callback
from runner.training.step import Step, SupervisedStep

RECIPE: dict[str, Any] = {
    "step": {"name": "supervised"},
    "model": {"name": "cnn", "width": 4},
    "data": {"name": "digits", "num_variants": 1},
    "objective": {"name": "classification"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "scheduler": {"name": "cosine"},
}


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{**RECIPE, **changes})


def problems(**changes: Any) -> list[str]:
    return [str(problem) for problem in parts.check_factories(recipe(**changes))]


def test_the_parts_of_a_recipe() -> None:
    torch.manual_seed(0)
    built = parts.build_parts(recipe(callbacks={"early_stopping": {}}))
    assert isinstance(built.step, SupervisedStep)
    assert len(built.data.train) > 1000  # type: ignore[arg-type]
    assert list(built.callbacks) == ["early_stopping"]
    assert isinstance(built.callbacks["early_stopping"], Callback)
    optimizer = built.step.optimizers["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    schedule = built.step.make_schedulers(10)["optimizer"]
    assert schedule.optimizer is optimizer


def test_targets_get_parameters_and_the_optimizer() -> None:
    built = parts.build_parts(
        recipe(
            optimizer={"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9},
            scheduler={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3},
        )
    )
    optimizer = built.step.optimizers["optimizer"]
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.5
    schedule = built.step.make_schedulers(10)["optimizer"]
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    assert schedule.step_size == 3


def test_no_scheduler_is_a_constant_rate() -> None:
    assert parts.build_parts(recipe(scheduler=None)).step.make_schedulers(10) == {}


def test_a_step_refuses_parts_it_would_not_use() -> None:
    found = problems(step={"name": "gan"})
    assert len(found) == 4
    assert "scheduler=cosine with step=gan: gan builds its own" in found[3]


def test_a_callback_is_switched_off_by_null() -> None:
    assert problems(callbacks={"early_stopping": None}) == []
    assert parts.build_parts(recipe(callbacks={"early_stopping": None})).callbacks == {}


def test_building_checks_again() -> None:
    with pytest.raises(ConfigError, match="no such argument"):
        parts.build_parts(recipe(model={"name": "cnn", "widht": 3}))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    trainer = Trainer(global_batch_size=10, micro_batch_size=4)
    (only,) = parts.check_machine(recipe(trainer=trainer))
    assert "10" in str(only)
    assert "4" in str(only)


class OwnStep(Step):
    """Has a constructor of its own."""

    def __init__(self, model: torch.nn.Module, rate: float = 0.1) -> None:
        self.models, self.optimizers, self.rate = {"model": model}, {}, rate

    def train(self, accelerator: Any, window: Any, trainer: Any) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self, batch: Any) -> dict[str, torch.Tensor]:
        return {}

    def summarize(self, values: Any) -> dict[str, float]:
        return {}


def test_a_step_of_the_users_own(registered: None, tmp_path: Path) -> None:
    register.step("own_a")(OwnStep)
    changes: dict[str, Any] = {"objective": None, "optimizer": None, "scheduler": None}
    step = parts.build_step(recipe(step={"name": "own_a", "rate": 0.5}, **changes))
    assert isinstance(step, OwnStep)
    assert step.rate == 0.5
    assert len(problems(step={"name": "own_a"})) == 3


class HandsOn(SupervisedStep):
    """Hands on what it does not name."""

    def __init__(self, rate: float = 0.1, **parts: Any) -> None:
        super().__init__(**parts)
        self.rate = rate


@pytest.mark.parametrize("scheduler", [RECIPE["scheduler"], None], ids=["cosine", "null"])
def test_a_step_that_hands_on_what_it_is_given(registered: None, scheduler: Any) -> None:
    register.step("hands_on")(HandsOn)
    found = recipe(step={"name": "hands_on", "rate": 0.5}, scheduler=scheduler)
    assert parts.check_factories(found) == []
    step = parts.build_step(found)
    assert isinstance(step, HandsOn)
    assert step.rate == 0.5
    assert isinstance(step.optimizers["optimizer"], torch.optim.AdamW)
    assert bool(step.make_schedulers(10)) is (scheduler is not None)
