"""R2, R10: which run `resume` means, and whether anything is left to do in it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.checkpoint import directory as checkpoints
from accel.config.training import ProjectConfiguration
from accel.machine.errors import ConfigError
from runner.recipe.schema import Checkpoint, DataLoader, Distributed, Recipe, Trainer
from runner.runs import directory, lock, resumable, sessions
from tests.runner.runs.test_directory import add_checkpoint, new_run

FIRST, SECOND, THIRD = (f"20260101-00000{second}-0000" for second in (1, 2, 3))


def auto(folder: Path, **fields: Any) -> Path | None:
    return resumable.newest(Recipe(name="digits", output_dir=str(folder), **fields))


def finished(run_dir: Path, **summary: Any) -> Path:
    content = {"complete": True, "stopped": "epochs", "step": 20, "epochs_completed": 2, **summary}
    (session,) = sessions.of_run(run_dir)
    sessions.begin(session)
    sessions.end(session, 0, summary=content)
    return run_dir


# -- resume=auto ---------------------------------------------------------------------------


def test_auto_takes_the_newest_run_that_has_a_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert auto(tmp_path) is None
    with_state = new_run(tmp_path, stamp=FIRST)
    add_checkpoint(with_state / "checkpoints", 7)
    without = new_run(tmp_path, stamp=SECOND)
    empty = tmp_path / "digits" / THIRD
    empty.mkdir()
    with caplog.at_level(logging.WARNING):
        assert auto(tmp_path) == with_state
    assert f"{without}: it has no complete checkpoint" in caplog.text
    assert f"{empty}: it was killed before its recipe was written" in caplog.text


def test_auto_never_takes_a_run_of_another_recipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = new_run(tmp_path, stamp=FIRST)
    add_checkpoint(other / "checkpoints", 7)
    killed = new_run(tmp_path, stamp=SECOND, seed=1)
    with caplog.at_level(logging.WARNING):
        assert auto(tmp_path, seed=1) is None
    assert f"{killed}: it has no complete checkpoint" in caplog.text
    assert f"{other}: its recipe is another (seed is 0 there, 1 here)" in caplog.text
    assert "it starts a new one" in caplog.text


def test_a_chosen_directory_with_another_run_is_refused_in_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = new_run(tmp_path, stamp=FIRST)
    add_checkpoint(other / "checkpoints", 7)
    with pytest.raises(ConfigError, match=r"holds another run: its recipe is another \(seed is 0"):
        auto(tmp_path, seed=5, run_dir=str(other))
    assert caplog.text == ""


def test_limits_make_no_other_run_of_it(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, stamp=FIRST)
    add_checkpoint(run_dir / "checkpoints", 7)
    for limits in ({"epochs": 9}, {"max_steps": 7}, {"max_time": 60}, {"stop_after": 3}):
        assert auto(tmp_path, trainer=Trainer(**limits)) == run_dir  # type: ignore[arg-type]
    assert auto(tmp_path, trainer=Trainer(global_batch_size=8)) is None


def test_auto_does_not_train_what_another_command_trains(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, stamp=FIRST)
    with lock.held(run_dir), pytest.raises(ConfigError, match="another command trains in"):
        auto(tmp_path)


# -- what is left --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "summary", "left"),
    [
        ({"epochs": 2}, {}, False),
        ({"epochs": 1}, {}, False),
        ({"epochs": 3}, {}, True),
        ({"epochs": 3, "max_steps": 20}, {}, False),
        ({"epochs": 2}, {"complete": False, "stopped": "signal"}, True),
        ({"epochs": 2, "max_time": 60}, {}, False),
        ({"epochs": 9}, {"stopped": "max_time"}, True),
    ],
)
def test_a_run_is_finished_where_its_limits_are_reached(
    trainer: dict[str, Any], summary: dict[str, Any], left: bool, tmp_path: Path
) -> None:
    run_dir = finished(new_run(tmp_path), **summary)
    wanted = Recipe(name="digits", trainer=Trainer(**trainer))
    assert (resumable.is_finished(run_dir, wanted) is None) == left


def test_a_run_that_a_callback_ended_is_finished_until_its_recipe_changes(tmp_path: Path) -> None:
    early = {"stopped": "callback", "reason": "no better for 3 epochs"}
    run_dir = finished(new_run(tmp_path, trainer=Trainer(epochs=9)), **early)
    same = Recipe(name="digits", trainer=Trainer(epochs=9))
    assert resumable.is_finished(run_dir, same) == "no better for 3 epochs (step 20)"
    more = replace(same, trainer=Trainer(epochs=12))
    assert resumable.is_finished(run_dir, more) is None


def test_what_changes_nothing_any_more_is_refused(tmp_path: Path) -> None:
    run_dir = finished(new_run(tmp_path, trainer=Trainer(epochs=2)))
    wanted = Recipe(name="digits", trainer=Trainer(epochs=1))
    resumable.require_effect(run_dir, wanted, "done")  # limits have been looked at
    with pytest.raises(ConfigError, match=r"seed=7 with resume=.*changes nothing any more"):
        resumable.require_effect(run_dir, replace(wanted, seed=7), "done")


@pytest.mark.parametrize(
    "change",
    [
        {"tags": ["a"]},
        {"dataloader": DataLoader(num_workers=1)},
        {"distributed": Distributed(kind="multi_cpu")},
    ],
)
def test_where_a_finished_run_is_computed_neither_reopens_nor_refuses_it(
    change: dict[str, Any], tmp_path: Path
) -> None:
    early = {"stopped": "callback", "reason": "no better for 3 epochs"}
    run_dir = finished(new_run(tmp_path, trainer=Trainer(epochs=9)), **early)
    wanted = Recipe(name="digits", trainer=Trainer(epochs=9), **change)
    reason = resumable.is_finished(run_dir, wanted)
    assert reason == "no better for 3 epochs (step 20)"
    resumable.require_effect(run_dir, wanted, reason, auto=True)
    if "distributed" not in change:
        with pytest.raises(ConfigError, match="changes nothing any more"):
            resumable.require_effect(run_dir, wanted, reason)


def test_a_folder_is_the_same_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path, stamp=FIRST, output_dir="runs", checkpoint=placed("cks"))
    add_checkpoint(directory.checkpoint_folder(run_dir), 7)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    for same in (str(tmp_path / "cks"), "../cks"):
        assert auto(tmp_path, checkpoint=placed(same)) == run_dir
    assert auto(tmp_path, checkpoint=placed("other")) is None
    finished(run_dir)
    wanted = Recipe(name="digits", output_dir="../runs", checkpoint=placed("../cks"))
    resumable.require_effect(run_dir, wanted, "done")


def placed(folder: str) -> Checkpoint:
    return Checkpoint(project=ProjectConfiguration(project_dir=folder))


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ({"epochs": 1}, "trainer.epochs=1"),
        ({"epochs": 3}, "Give trainer.epochs at least 4"),
        ({"max_steps": 60, "epochs": 9}, "Give trainer.max_steps at least 70"),
        ({"epochs": 4}, None),
        ({"max_steps": 70, "epochs": 9}, None),
    ],
)
def test_a_limit_that_a_run_has_passed_is_refused(
    trainer: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint_0"
    staged = checkpoints.stage(path)
    checkpoints.seal(staged, {}, {"step": 70, "epoch": 3, "samples_in_epoch": 64})
    checkpoints.publish(staged, path)
    wanted = Recipe(name="digits", trainer=Trainer(**trainer))
    if told is None:
        resumable.require_reach(tmp_path, path, wanted)
        return
    with pytest.raises(ConfigError, match=told):
        resumable.require_reach(tmp_path, path, wanted)
