"""A run that is cut off and resumed, cut up or spread over processes, is the same run (R2)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from accel.checkpoint.directory import checkpoints, read_manifest
from accel.machine.errors import ConfigError
from runner.data.datasets import Data
from runner.training.console import Display
from tests.helpers import about, run_distributed
from tests.runner.loops import (
    NUM_TRAIN,
    NUM_VALIDATION,
    Points,
    Spy,
    build,
    losses,
    newest,
    recipe_of,
    records,
    run,
    weights,
)

# -- resume --------------------------------------------------------------------------------


def equal_weights(one: Path, other: Path) -> None:
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def noisy() -> Data:
    return Data(Points(NUM_TRAIN, noisy=True), Points(NUM_VALIDATION), Points(9))


@pytest.mark.parametrize("cut", [3, 5, 7], ids=["mid-epoch", "epoch end", "second epoch"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, cut: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"dropout": 0.3}
    run(whole, recipe_of(trainer__max_steps=12), data=noisy(), **options)
    recipe = recipe_of(trainer__max_steps=12, trainer__stop_after=cut)
    run(parts, recipe, data=noisy(), **options)
    recipe.trainer.stop_after = None
    run(parts, recipe, data=noisy(), resume_from=newest(parts), **options)
    assert losses(parts) == losses(whole)
    assert [r["step"] for r in records(parts)] == list(range(1, 13))
    assert [r["lr"] for r in records(parts)] == [r["lr"] for r in records(whole)]
    assert [r["loss"] for r in records(parts, "validation")] == [
        r["loss"] for r in records(whole, "validation")
    ]
    equal_weights(whole, parts)


def test_with_loader_workers_and_a_second_resume_too(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = {"trainer__max_steps": 8, "dataloader__num_workers": 2}
    run(whole, recipe_of(**common), data=noisy(), dropout=0.3)
    run(parts, recipe_of(**common, trainer__stop_after=2), data=noisy(), dropout=0.3)
    for stop in (6, None):
        recipe = recipe_of(**common, trainer__stop_after=stop)
        run(parts, recipe, data=noisy(), dropout=0.3, resume_from=newest(parts))
    assert losses(parts) == losses(whole)
    equal_weights(whole, parts)


def test_values_between_log_points_survive(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, recipe_of(trainer__max_steps=8, trainer__log_every=4))
    recipe = recipe_of(trainer__max_steps=8, trainer__log_every=4, trainer__stop_after=6)
    run(parts, recipe)
    recipe.trainer.stop_after = None
    run(parts, recipe, resume_from=newest(parts))
    assert losses(parts) == losses(whole)


def test_the_best_value_is_remembered_where_no_best_state_is_kept(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=2, trainer__stop_after=7, checkpoint__keep_best=0)
    first = run(tmp_path, recipe)
    recipe.trainer.stop_after = None
    summary = run(tmp_path, recipe, resume_from=newest(tmp_path))
    assert (first["best"]["step"], first["best"]["checkpoint"]) == (5, None)
    assert summary["best"]["step"] in (5, 10)
    assert read_manifest(newest(tmp_path)).metadata["best"] is None


def test_steps_after_the_checkpoint_are_not_logged_twice(tmp_path: Path) -> None:
    recipe = recipe_of(
        trainer__max_steps=8, checkpoint__every_epochs=None, checkpoint__every_steps=2
    )
    run(tmp_path, recipe)
    older = checkpoints(tmp_path / "checkpoints")[-2]
    assert read_manifest(older).metadata["step"] == 6
    before = losses(tmp_path)
    run(tmp_path, recipe, resume_from=older)
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 9))
    assert losses(tmp_path) == before


def test_callbacks_are_restored_and_may_come_and_go(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=2, trainer__stop_after=5)
    run(tmp_path, recipe, callbacks={"kept": Spy(), "dropped": Spy()})
    recipe.trainer.stop_after = None
    spies = {"kept": Spy(), "added": Spy()}
    out = io.StringIO()
    shown = Display(console=Console(file=out, width=200))
    run(tmp_path, recipe, callbacks=spies, resume_from=newest(tmp_path), display=shown)
    assert (spies["kept"].calls, spies["added"].calls) == (10, 5)
    assert "callbacks.added" in out.getvalue()
    assert "callbacks.dropped" in out.getvalue()
    assert "step 5, epoch 2" in out.getvalue()


def test_a_finished_run_resumes_to_its_end_at_once(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=2)
    first = run(tmp_path, recipe)
    again = run(tmp_path, recipe, resume_from=newest(tmp_path))
    assert (again["step"], again["stopped"]) == (10, "epochs")
    assert again["best"] == first["best"]
    assert again["metrics"]["test"] == first["metrics"]["test"]
    assert len(records(tmp_path, "test")) == 1


def test_a_global_batch_that_does_not_fit_the_position_is_refused(tmp_path: Path) -> None:
    run(tmp_path, recipe_of(trainer__stop_after=3))
    recipe = recipe_of(trainer__global_batch_size=10)
    with pytest.raises(ConfigError, match="24 samples into an epoch"):
        run(tmp_path, recipe, resume_from=newest(tmp_path))
    summary = run(
        tmp_path,
        recipe_of(trainer__global_batch_size=4, trainer__epochs=1),
        resume_from=newest(tmp_path),
    )
    assert (summary["samples"], summary["step"]) == (NUM_TRAIN, 3 + 4)


# -- streams, accumulation, processes ------------------------------------------------------


def test_accumulation_trains_the_same_model(tmp_path: Path) -> None:
    run(tmp_path / "plain", recipe_of(trainer__max_steps=12))
    run(tmp_path / "accumulated", recipe_of(trainer__max_steps=12, trainer__micro_batch_size=2))
    assert losses(tmp_path / "accumulated") == about(losses(tmp_path / "plain"))


def train_on_rank(run_dir: str, changes: dict[str, Any], resume_from: str | None) -> dict[str, Any]:
    loop = build(Path(run_dir), recipe_of(**changes), resume_from=resume_from)
    return loop.run()


def test_two_processes_see_the_losses_of_one(tmp_path: Path) -> None:
    changes = {"trainer__max_steps": 12, "trainer__eval_every": 2}
    run(tmp_path / "one", recipe_of(**changes))
    summaries = run_distributed(train_on_rank, 2, str(tmp_path / "two"), changes, None)
    assert losses(tmp_path / "two") == about(losses(tmp_path / "one"))
    assert summaries[0]["best"] == summaries[1]["best"]
    measured = [record["count"] for record in records(tmp_path / "two", "validation")]
    assert measured == [NUM_VALIDATION] * 6


def test_a_run_moves_from_two_processes_to_one(tmp_path: Path) -> None:
    run(tmp_path / "whole", recipe_of(trainer__max_steps=12))
    changes = {"trainer__max_steps": 12, "trainer__stop_after": 7}
    run_distributed(train_on_rank, 2, str(tmp_path / "moved"), changes, None)
    recipe = recipe_of(trainer__max_steps=12)
    run(tmp_path / "moved", recipe, resume_from=newest(tmp_path / "moved"))
    assert losses(tmp_path / "moved") == about(losses(tmp_path / "whole"))
