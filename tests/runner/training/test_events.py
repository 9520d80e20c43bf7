"""X1: the events that a callback may answer, in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from runner.training.loop import Loop
from runner.training.run import Callback
from tests.runner.loops import build, newest, recipe_of, run

EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


class Teller(Callback):
    """Keeps the names of the events."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _answer(name: str) -> Any:
    def event(self: Teller, loop: Loop, *values: object) -> None:
        split = [value for value in values[:1] if value in ("validation", "test")]
        self.events.append(" ".join([name.removeprefix("on_"), *map(str, split)]))

    return event


for _name in EVENTS:
    setattr(Teller, _name, _answer(_name))


def test_events_come_in_their_order(tmp_path: Path) -> None:
    teller = Teller()
    recipe = recipe_of(trainer__epochs=1, trainer__sanity_steps=1, trainer__limit_train_batches=1)
    run(tmp_path, recipe, callbacks={"teller": teller})
    assert teller.events == [
        *("setup", "sanity_check", "start", "epoch_start", "before_optimizer_step", "step"),
        *("epoch_end", "log", "evaluation_start validation", "evaluation_end validation"),
        *("evaluate validation", "save_start", "save_end", "checkpoint"),
        *("evaluation_start test", "evaluation_end test", "evaluate test", "end"),
    ]


def test_an_error_is_told_to_callbacks(tmp_path: Path) -> None:
    class Failing(Callback):
        def __init__(self) -> None:
            self.told: list[str] = []

        def on_epoch_start(self, loop: Loop) -> None:
            raise RuntimeError("no")

        def on_exception(self, loop: Loop, error: Exception) -> None:
            self.told.append(str(error))

    failing = Failing()
    with pytest.raises(RuntimeError, match="no"):
        run(tmp_path, recipe_of(), callbacks={"failing": failing})
    assert failing.told == ["no"]


def test_gradients_may_be_read_and_changed_before_the_optimizer_steps(tmp_path: Path) -> None:
    class Zeros(Callback):
        def on_before_optimizer_step(self, loop: Loop) -> None:
            for parameter in loop.step.models["model"].parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()

    recipe = recipe_of(trainer__epochs=1)
    loop = build(
        tmp_path,
        recipe,
        callbacks={"zeros": Zeros()},
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        make_scheduler=None,
    )
    before = {name: value.clone() for name, value in loop.step.models["model"].state_dict().items()}
    loop.run()
    after = loop.step.models["model"].state_dict()
    assert all(mse_loss(after[name], value) == 0 for name, value in before.items())
    assert newest(tmp_path).exists()
