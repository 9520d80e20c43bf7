"""Metrics of a run in metrics.jsonl and in trackers."""

from __future__ import annotations

from pathlib import Path

import torch

from runner.reporting.recorder import learning_rates
from tests.runner.loops import (
    build,
    recipe_of,
)


def test_trackers_get_the_values_under_their_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_of(trainer__epochs=1, tracker__log_with=["tensorboard"])
    loop = build(tmp_path, recipe)
    loop.run()
    loop.accelerator.end_training()
    events = [path.parent for path in tmp_path.rglob("events.out.tfevents.*")]
    accumulator = EventAccumulator(str(min(events, key=lambda path: len(path.parts))))
    accumulator.Reload()
    expected = {"train/loss", "validation/loss", "test/loss", "lr", "samples_per_second"}
    assert expected <= set(accumulator.Tags()["scalars"])
    assert [event.step for event in accumulator.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_learning_rates_are_those_of_the_first_groups() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:2], "lr": 0.5}]
    one = torch.optim.SGD(groups, lr=0.1)
    two = torch.optim.SGD(parameters[2:], lr=0.2)
    assert learning_rates({"a": one}) == {"lr": 0.1}
    assert learning_rates({"a": one, "b": two}) == {"lr": 0.1, "lr_a": 0.1, "lr_b": 0.2}
    assert learning_rates({}) == {}
