"""Finders keep the losses of the run, and suggest by their slope (R1, C1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.callbacks.finders import LRFind, PeakMemory, smoothed, steepest
from tests.runner.loops import build, losses, recipe_of


def test_rates_grow_by_one_factor_until_the_loss_diverges(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=None, trainer__max_steps=40, trainer__stop_on_nan=False)
    callbacks = {"find": LRFind(1e-3, 1e3, 40), "memory": PeakMemory()}
    found = build(tmp_path, recipe, make_scheduler=None, callbacks=callbacks).run()
    curve = found["lr_find"]
    assert found["reason"] == "the loss diverges"
    assert curve["rates"][:3] == pytest.approx([1e-3 * 10 ** (n * 6 / 39) for n in range(3)])
    assert 10 < len(losses(tmp_path)) < 40
    assert curve["losses"] == smoothed(losses(tmp_path))
    assert 1e-3 < curve["suggestion"] < 1
    assert found["memory"][0] > 1e8


def test_the_suggestion_is_where_losses_fall_fastest() -> None:
    rates = [10.0**n for n in range(-6, 1)]
    assert steepest(rates, [2.0, 2.0, 1.9, 1.2, 1.0, 9.0, 1.0]) == rates[3]
    assert steepest(rates, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) is None
    assert smoothed([1.0, 2.0, 3.0, 4.0], reach=1) == [1.5, 2.0, 3.0, 3.5]
    with pytest.raises(ConfigError, match=r"from 1.0 to 0.1 .*--min 1e-6"):
        LRFind(1.0, 0.1)
