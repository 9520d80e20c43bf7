"""R8, E6: logged values stand once, under their names, in the record and in trackers."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.checkpoint.directory import checkpoints
from accel.machine.errors import ConfigError
from accel.trackers.table import TRACKERS
from runner.data.datasets import Data
from tests import commands
from tests.accel.trackers.offline import needs
from tests.accel.trackers.test_wandb import records as wandb_records
from tests.helpers import ROOT, python
from tests.runner.loops import NUM_TRAIN, Fit, Points, build, losses, recipe_of, records, run


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
    drain = loop.recorder.meter.drain
    monkeypatch.setattr(
        loop.recorder.meter, "drain", lambda: (drained.append(loop.state.step), drain())
    )
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


class Timed(Fit):
    """Measures something under a name that the run itself has."""

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {**super().summarize(values), "time": 0.5}


def test_a_name_of_the_runs_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Timed.summarize returned 'time': .* \"own_time\""):
        run(tmp_path / "a", recipe_of(trainer__sanity_steps=1), objective=Timed())
    loop = build(tmp_path / "b", recipe_of())
    train = loop.step.train
    logged = {"lr_own": torch.tensor(7.0)}
    monkeypatch.setattr(loop.step, "train", lambda *given: {**train(*given), **logged})
    with pytest.raises(ConfigError, match=r"SupervisedStep.train returned 'lr_own'"):
        loop.run()


def test_a_resumed_run_appends_to_its_trackers_files(tmp_path: Path) -> None:
    recipe = recipe_of(
        trainer__max_steps=8,
        checkpoint__every_epochs=None,
        checkpoint__every_steps=2,
        tracker__log_with=["csv"],
    )
    build(tmp_path, recipe).run()
    older = checkpoints(tmp_path / "checkpoints")[-2]
    table = tmp_path / "tensorboard" / recipe.name / "metrics.csv"
    before = logged_losses(table)
    assert [step for step, _ in before] == list(range(1, 9))
    again = build(tmp_path, recipe, resume_from=older)
    again.run()
    again.accelerator.end_training()
    assert logged_losses(table) == before  # steps 7 and 8 once


def test_what_is_measured_again_after_a_kill_stands_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(trainer__epochs=2, tracker__log_with=["csv"])
    build(tmp_path / "whole", recipe).run()
    killed = build(tmp_path / "killed", recipe)
    monkeypatch.setattr(killed, "notify", ended_at(killed, 8))
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    (state,) = checkpoints(tmp_path / "killed" / "checkpoints")
    build(tmp_path / "killed", recipe, resume_from=state).run()
    assert measured(tmp_path / "killed", recipe.name) == measured(tmp_path / "whole", recipe.name)
    last = checkpoints(tmp_path / "killed" / "checkpoints")[-1]
    build(tmp_path / "killed", recipe, resume_from=last).run()  # killed before its summary
    assert measured(tmp_path / "killed", recipe.name) == measured(tmp_path / "whole", recipe.name)
    recipe.trainer.epochs = 3
    build(tmp_path / "killed", recipe, resume_from=last).run()
    tested = [line["step"] for line in lines_of(tmp_path / "killed") if line["split"] == "test"]
    assert tested == [10, 15]  # what was measured before the run went on stays


def test_trackers_get_no_password_of_an_address(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__max_steps=1, tracker__log_with=["csv"])
    recipe.tags = ["db=postgresql://me:hunter2@host/x"]
    run(tmp_path, recipe)
    (file,) = tmp_path.rglob("config.json")
    assert json.loads(file.read_text())["tags"] == ["db=postgresql://me:***@host/x"]


def ended_at(loop: Any, step: int) -> Any:
    notify = loop.notify

    def notified(event: str, *values: object) -> None:
        if loop.state.step == step:
            raise KeyboardInterrupt
        notify(event, *values)

    return notified


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def measured(run_dir: Path, name: str) -> tuple[list[Any], list[Any]]:
    """Return what the file and the tracker have of evaluations, in order."""
    table = run_dir / "tensorboard" / name / "metrics.csv"
    with table.open(newline="") as file:
        rows = [(r["step"], r["validation/loss"], r["test/loss"]) for r in csv.DictReader(file)]
    found = [(line["step"], line["split"], line["loss"]) for line in lines_of(run_dir)]
    return [one for one in found if one[1] != "train"], [row for row in rows if any(row[1:])]


def logged_losses(table: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of the rows of training."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    return [(int(row["step"]), float(row["train/loss"])) for row in rows]


def command(folder: Path, *overrides: str, **environment: str) -> None:
    """Run `python -m runner` in `folder`, small and fast."""
    small = ("trainer.log_every=1", "trainer.global_batch_size=64")
    known = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), **environment}
    answer = commands.run("-m", "runner", *small, *overrides, cwd=folder, environment=known)
    assert answer.returncode == 0, answer.stdout + answer.stderr


RECIPES = sorted(path.stem for path in (ROOT / "conf" / "tracker").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_tracker_trains_without_a_server(name: str, tmp_path: Path) -> None:
    entry = TRACKERS.get(name)
    if entry is not None and not entry.is_available():
        pytest.skip(f"no {entry.package} here")
    offline = {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "COMET_OFFLINE_DIRECTORY": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    without = {"comet_ml": ["tracker.init_kwargs.comet_ml.online=false"]}
    command(tmp_path, f"tracker={name}", "trainer.stop_after=2", *without.get(name, []), **offline)
    assert len(list(tmp_path.glob("runs/digits/*/metrics.jsonl"))) == 1


@needs("mlflow")
def test_a_recipe_names_several_trackers_and_resumes_them(tmp_path: Path) -> None:
    script = "import sys; from mlflow import MlflowClient\n" + (
        "client = MlflowClient('sqlite:///runs/mlflow/mlflow.db')\n"
        "experiment = client.get_experiment_by_name('digits')\n"
        "run, = client.search_runs([experiment.experiment_id])\n"
        "history = client.get_metric_history(run.info.run_id, 'train/loss')\n"
        "steps = [metric.step for metric in history]\n"
        "print(run.info.status, steps, run.data.params['optimizer/lr'])"
    )
    command(tmp_path, "tracker=[tensorboard,mlflow,csv]", "trainer.stop_after=3")
    run_dir = next(tmp_path.glob("runs/digits/*/config.yaml")).parent
    command(tmp_path, f"resume={run_dir}", "trainer.stop_after=5")
    done = subprocess.run(python("-c", script), cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("FINISHED [1, 2, 3, 4, 5] 0."), done.stderr
    table = run_dir / "tensorboard" / "digits" / "metrics.csv"
    assert [step for step, _ in logged_losses(table)] == [1, 2, 3, 4, 5]
    assert list((run_dir / "tensorboard" / "digits").glob("events.out.tfevents.*"))


@needs("wandb")
def test_a_recipe_resumes_its_run_of_wandb(tmp_path: Path) -> None:
    command(tmp_path, "tracker=wandb", "trainer.stop_after=2", WANDB_MODE="offline")
    run_dir = next(tmp_path.glob("runs/digits/*/config.yaml")).parent
    command(tmp_path, f"resume={run_dir}", "trainer.stop_after=3", WANDB_MODE="offline")
    files = sorted(tmp_path.glob("runs/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1  # one run id
    steps = [
        item.value_json
        for path in files
        for record in wandb_records(path)
        for item in record.history.item
        if (item.key or "/".join(item.nested_key)) == "_step"
    ]
    assert [int(step) for step in steps] == [1, 2, 3]
    named = [record.run.display_name for record in wandb_records(files[0])]
    assert set(filter(None, named)) == {run_dir.name}
