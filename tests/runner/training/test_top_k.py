"""R2, R4: which checkpoints are kept, also of a run that is killed while they change."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.checkpoint.directory import checkpoints, read_manifest, verify
from accel.config.training import ProjectConfiguration
from accel.machine.errors import CheckpointError, ConfigError
from runner.recipe.schema import Checkpoint, Recipe
from runner.runs.resumable import require_reach
from runner.training.loop import Loop
from runner.training.run import Callback
from tests.helpers import WorkerError, run_distributed
from tests.runner.loops import Fit, Spy, newest, recipe_of, records, run, weights

VALUES = (0.5, 0.3, 0.9, 0.3, 0.2, 0.8, math.nan, 0.25, 0.7, 0.6)  # of steps 2, 4, …, 20
BEST = [10, 16, 4]  # of equal values the earlier one


class Given(Fit):
    """The validation loss of a step is given, whatever was measured before."""

    step = 0

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {**super().summarize(values), "loss": VALUES[self.step // 2 - 1]}


class Follow(Callback):
    def on_evaluation_start(self, loop: Loop, split: str) -> None:
        loop.step.objective.step = loop.state.step  # type: ignore[attr-defined]


def recipe(**settings: Any) -> Recipe:
    found = recipe_of(trainer__epochs=None, trainer__max_steps=20, trainer__eval_every=2)
    project = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    found.checkpoint = Checkpoint(project=project, every_epochs=None, keep_best=3, **settings)
    return found


def train(folder: Path, resume: Path | None = None, **settings: Any) -> dict[str, Any]:
    callbacks = {"follow": Follow()}
    return run(
        folder, recipe(**settings), objective=Given(), callbacks=callbacks, resume_from=resume
    )


def steps_saved(folder: Path) -> list[int]:
    return [read_manifest(path).metadata["step"] for path in checkpoints(folder / "checkpoints")]


def test_the_best_three_of_ten_evaluations_stay(tmp_path: Path) -> None:
    summary = train(tmp_path)
    assert steps_saved(tmp_path) == [4, 10, 16, 20]  # and the newest two
    assert summary["best"]["step"] == 10


def test_every_so_many_steps_one_stays_of_which_only_weights_are_left(tmp_path: Path) -> None:
    train(tmp_path / "whole", keep_every=5)
    train(tmp_path / "reduced", keep_every=5, weights_only=True)
    for folder in ("whole", "reduced"):
        assert steps_saved(tmp_path / folder) == [4, 5, 10, 15, 16, 20]
    for path in checkpoints(tmp_path / "reduced" / "checkpoints"):
        manifest = verify(path)
        whole = manifest.metadata["step"] in (16, 20)
        assert ("optimizer.bin" in manifest.files) is whole
        assert "model.safetensors" in manifest.files
        if not whole:
            with pytest.raises(ConfigError, match=r"only the weights.*init_from="):
                require_reach(tmp_path / "reduced", path, recipe())


def test_a_checkpoint_is_written_each_time_interval(tmp_path: Path) -> None:
    train(tmp_path, every_time=1e-9)
    assert len(steps_saved(tmp_path)) == 5  # the best three and the newest two
    assert steps_saved(tmp_path)[-2:] == [19, 20]


def reduced(folder: Path, resume: Path | None = None) -> None:
    train(folder, resume, weights_only=True)


def _killed(folder: Path, nth: int) -> None:
    """Train, and be killed instead of the `nth` rename or removal of a directory."""
    count = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    import shutil

    os.rename, shutil.rmtree = counted(os.rename), counted(shutil.rmtree)
    reduced(folder)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("nth", [1, 2, 4, 6, 7, 9, 11, 14])
def test_killed_while_checkpoints_change_and_resumed_the_same_stay(
    nth: int, num_processes: int, tmp_path: Path
) -> None:
    run_distributed(reduced, num_processes, tmp_path / "whole")
    folder = tmp_path / "killed"
    with pytest.raises(WorkerError, match=r"died \(exit code -9\)"):
        run_distributed(_killed, num_processes, folder, nth)
    complete = []
    for path in checkpoints(folder / "checkpoints"):
        try:
            complete.append(verify(path))
        except CheckpointError:
            continue
    if complete:  # what the newest says of the best is there
        best = complete[-1].metadata["best"]
        steps = [manifest.metadata["step"] for manifest in complete]
        assert best is None or best["step"] in steps
    run_distributed(reduced, num_processes, folder, newest(folder) if complete else None)
    assert steps_saved(folder) == steps_saved(tmp_path / "whole")
    assert all(torch.equal(v, weights(folder)[n]) for n, v in weights(tmp_path / "whole").items())


def test_evaluations_come_in_parts_of_epochs_and_before_the_first_step(tmp_path: Path) -> None:
    for folder, every, steps in (
        ("part", 0.4, [0, 2, 4, 6, 8, 10, 12, 14, 15]),
        ("epochs", "2 epochs", [0, 10, 15]),
        ("time", "01:00:00", [0, 15]),
    ):
        run(
            tmp_path / folder,
            recipe_of(trainer__epochs=3, trainer__eval_every=every, trainer__eval_first=True),
        )
        found = records(tmp_path / folder, "validation")
        assert [record["step"] for record in found] == steps


def test_nothing_is_evaluated_where_the_recipe_says_so(tmp_path: Path) -> None:
    summary = run(tmp_path, recipe_of(trainer__epochs=2, trainer__evaluate=False))
    assert (summary["metrics"], summary["best"]) == ({}, None)
    with pytest.raises(ConfigError, match=r"monitor=loss without validation data.*evaluate=true"):
        run(tmp_path / "b", recipe_of(trainer__evaluate=False, checkpoint__monitor="loss"))


class Slow(Spy):
    """Rank 1 takes twice as long for a step."""

    def on_step(self, loop: Loop) -> None:
        time.sleep(0.04 * (1 + loop.accelerator.process_index))


def by_time(folder: Path) -> list[Any]:
    recipe = recipe_of(
        trainer__epochs=8, trainer__eval_every="00:00:01", checkpoint__every_time=0.7
    )
    spy = Slow()
    run(folder, recipe, callbacks={"slow": spy})
    return spy.events


@pytest.mark.slow
def test_all_ranks_agree_on_what_is_due_by_time(tmp_path: Path) -> None:
    """R1: rank 0's clock decides; a rank that evaluated alone would wait for the others."""
    first, second = run_distributed(by_time, 2, tmp_path)
    assert first == second
    assert len([event for event in first if event[0] == "evaluate"]) > 2
    assert len([event for event in first if event[0] == "checkpoint"]) > 2
