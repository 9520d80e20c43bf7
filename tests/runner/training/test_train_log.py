"""Values of training steps at log points."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.data.datasets import Data
from tests.runner.loops import (
    NUM_TRAIN,
    Points,
    build,
    losses,
    recipe_of,
    records,
    run,
)


def test_a_logged_rate_is_that_of_the_step(tmp_path: Path) -> None:
    run(tmp_path, recipe_of(trainer__epochs=2, trainer__log_every=3))
    rates = [record["lr"] for record in records(tmp_path)]
    per_step = [0.02 * (1 - 0.9 * step / 10) for step in range(10)]
    assert rates == pytest.approx([per_step[step - 1] for step in (3, 6, 9, 10)])


def test_a_log_point_gives_the_mean_of_its_steps(tmp_path: Path) -> None:
    run(tmp_path / "each", recipe_of(trainer__max_steps=7))
    run(tmp_path / "third", recipe_of(trainer__max_steps=7, trainer__log_every=3))
    each = losses(tmp_path / "each")
    third = records(tmp_path / "third")
    assert [record["step"] for record in third] == [3, 6, 7]
    means = [sum(each[:3]) / 3, sum(each[3:6]) / 3, each[6]]
    assert [record["loss"] for record in third] == pytest.approx(means, rel=1e-6)
    assert third[-1]["lr"] == records(tmp_path / "each")[-1]["lr"]


def test_the_device_is_read_at_log_points_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(
        trainer__epochs=2,
        trainer__log_every=5,
        trainer__clip_grad_norm=1.0,
        checkpoint__at_end=False,
        checkpoint__every_epochs=None,
    )
    loop = build(tmp_path, recipe, data=Data(Points(NUM_TRAIN)))
    drained: list[int] = []
    drain = loop.meter.drain
    monkeypatch.setattr(loop.meter, "drain", lambda: (drained.append(loop.state.step), drain()))
    loop.run()
    assert drained == [5, 10]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_skipped_steps_of_fp16_are_counted(clip: float | None, tmp_path: Path) -> None:
    recipe = recipe_of(trainer__max_steps=2, precision__mode="fp16", trainer__log_every=2)
    recipe.trainer.clip_grad_norm = clip  # the norm of such a step is no reason to stop
    assert recipe.trainer.stop_on_nan
    recipe.precision.scaler.init_scale = 2.0**40
    run(tmp_path, recipe, data=Data(Points(NUM_TRAIN)))
    (record,) = records(tmp_path)
    assert record["skipped_steps"] == 2.0
    assert "grad_norm" not in record
    assert record["lr"] == 0.02
