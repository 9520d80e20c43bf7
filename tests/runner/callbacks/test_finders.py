"""Finders keep the plain loop's losses, and suggest by their slope (R1, C1)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from runner.callbacks.finders import LRFind, PeakMemory, smoothed, steepest
from tests.runner.loops import build, recipe_of, records


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [*model[0].parameters()], "lr": 0.01},
        {"params": [*model[3].parameters()], "lr": 0.04},
    ]
    return torch.optim.SGD(groups)


def test_rates_grow_by_one_factor_until_the_loss_diverges(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=None, trainer__max_steps=40, trainer__stop_on_nan=False)
    callbacks = {"find": LRFind(1e-3, 1e3, 40), "memory": PeakMemory()}
    arguments = {"make_optimizer": two_groups, "make_scheduler": None, "callbacks": callbacks}
    loop = build(tmp_path, recipe, **arguments)
    found = loop.run()
    curve, lines = found["lr_find"], records(tmp_path)
    assert found["reason"] == "the loss diverges"
    assert 10 < len(lines) < 40
    assert curve["rates"][:3] == pytest.approx([1e-3 * 10 ** (n * 6 / 39) for n in range(3)])
    finite = [line["loss"] for line in lines if math.isfinite(line["loss"])]
    assert curve["losses"] == finite
    one, other = (group["lr"] for group in loop.step.optimizers["optimizer"].param_groups)
    assert other == pytest.approx(4 * one)
    assert 1e-2 < curve["suggestion"] < 1
    assert found["memory"][0] > 1e8
    assert found["memory"][1] == "cpu"


def test_the_suggestion_is_where_losses_fall_fastest() -> None:
    rates = [10.0**n for n in range(-6, 1)]
    assert steepest(rates, [2.0, 2.0, 1.9, 1.2, 1.0, 9.0, 1.0]) == rates[3]
    assert steepest(rates, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) is None
    assert smoothed([1.0, 2.0, 3.0, 4.0], reach=1) == [1.5, 2.0, 3.0, 3.5]
    with pytest.raises(ConfigError, match=r"from 1.0 to 0.1 .*--min 1e-6"):
        LRFind(1.0, 0.1)
