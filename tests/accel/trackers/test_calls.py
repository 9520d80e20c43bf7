"""Which calls of its library each tracker makes; no library needs to be installed (E1, R8)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accel.tracking import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)
from tests.accel.trackers.fakes import Fake, library

CONFIG = {"optimizer": {"lr": 0.1}, "name": "digits"}
VALUES = {"loss": torch.tensor(0.5), "parts": {"a": 1.0}, "note": "fine"}
PIXELS = np.zeros((4, 4, 3), dtype=np.uint8)


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def assert_is_of(tracker: Any, run: str, name: str, resumed: dict[str, Any]) -> None:
    """Check which run a tracker has, where its id comes from, and how "a" would be resumed."""
    assert tracker.tracker == Fake(run, [], {})
    assert tracker.run_id == f"{run}.{name}"
    assert tracker.resume_arguments("a") == resumed


def finished(tracker: Any, fake: Fake, path: str) -> list[Any]:
    """Return the calls of `path` after the tracker was told twice to finish."""
    tracker.finish()
    tracker.finish()
    return fake.got(path)


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library(monkeypatch, "wandb")
    tracker = WandBTracker("proj", mode="offline")
    tracker.start()
    assert fake.got("wandb.init") == [call(project="proj", mode="offline")]
    run = "wandb.init()"
    assert_is_of(tracker, run, "id", {"id": "a", "resume": "allow"})
    tracker.store_init_configuration(CONFIG)
    assert fake.got(f"{run}.config.update") == [call(CONFIG, allow_val_change=True)]
    tracker.log(VALUES, step=3, commit=True)
    plain = {"loss": 0.5, "parts": {"a": 1.0}, "note": "fine"}
    tracker.log_images({"digits": [PIXELS]}, step=4, caption="c")
    assert fake.got("wandb.Image")[0][1] == {"caption": "c"}
    tracker.log_table("t", ["x"], [[1]], None, 5, commit=False)
    tracker.log_table("u", dataframe="frame")
    assert fake.got("wandb.Table") == [
        call(columns=["x"], data=[[1]], dataframe=None),
        call(columns=None, data=None, dataframe="frame"),
    ]
    image, table = (Fake(f"wandb.{kind}()", [], {}) for kind in ("Image", "Table"))
    assert fake.got(f"{run}.log") == [
        call(plain, step=3, commit=True),
        call({"digits": [image]}, step=4),
        call({"t": table}, step=5, commit=False),
        call({"u": table}, step=None),
    ]
    assert finished(tracker, fake, f"{run}.finish") == [call(exit_code=None)]


def test_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library(monkeypatch, "comet_ml")
    tracker = CometMLTracker("proj", online=False)
    tracker.start()
    assert fake.got("comet_ml.start") == [call(project_name="proj", online=False)]
    run = "comet_ml.start()"
    assert_is_of(tracker, run, "get_key()", {"experiment_key": "a", "mode": "get_or_create"})
    tracker.store_init_configuration(CONFIG)
    assert fake.got(f"{run}.log_parameters") == [call(CONFIG)]
    tracker.log(VALUES, step=3, epoch=1)
    numbers = {"loss": 0.5, "parts/a": 1.0}
    assert fake.got(f"{run}.set_step") == [call(3)]
    assert fake.got(f"{run}.log_metrics") == [call(numbers, step=3, epoch=1)]
    assert fake.got(f"{run}.log_other") == [call("note", "fine")]
    tracker.log_images({"digits": [PIXELS]}, step=4, overwrite=True)
    assert fake.got(f"{run}.log_image")[0][1] == {
        "name": "digits",
        "step": 4,
        "overwrite": True,
        "image_minmax": (0, 255),
    }
    assert finished(tracker, fake, f"{run}.end") == [call()]


def test_aim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = library(monkeypatch, "aim")
    tracker = AimTracker("mine", tmp_path / "logs", system_tracking_interval=None)
    tracker.start()
    repo = str(tmp_path / "logs")
    assert fake.got("aim.Run") == [
        call(experiment="mine", system_tracking_interval=None, repo=repo)
    ]
    run = "aim.Run()"
    assert_is_of(tracker, run, "hash", {"run_hash": "a"})
    tracker.store_init_configuration({**CONFIG, "kind": int})
    assert fake.got(f"{run}[hparams] =") == [call({**CONFIG, "kind": str(int)})]
    tracker.log(VALUES, step=3, context={"subset": "train"})
    text, image = Fake("aim.Text()", [], {}), Fake("aim.Image()", [], {})
    options = {"aim_image": {"format": "png"}, "track": {"context": {"subset": "test"}}}
    tracker.log_images({"digits": (PIXELS, "caption")}, 4, options)
    assert fake.got("aim.Image")[0][1] == {"caption": "caption", "format": "png"}
    assert fake.got(f"{run}.track") == [
        call(0.5, name="loss", step=3, context={"subset": "train"}),
        call(1.0, name="parts/a", step=3, context={"subset": "train"}),
        call(text, name="note", step=3, context={"subset": "train"}),
        call(image, name="digits", step=4, context={"subset": "test"}),
    ]
    assert finished(tracker, fake, f"{run}.close") == [call()]


def test_clearml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library(monkeypatch, "clearml", clearml__Task__current_task=None)
    monkeypatch.setenv("CLEARML_TASK", "of-env")
    tracker = ClearMLTracker("mine", tags=["a"])
    tracker.start()
    names = {"project_name": "mine", "task_name": "of-env", "tags": ["a"]}
    assert fake.got("clearml.Task.init") == [call(**names)]
    run = "clearml.Task.init()"
    assert_is_of(tracker, run, "id", {"reuse_last_task_id": "a", "continue_last_task": 0})
    tracker.store_init_configuration(CONFIG)
    assert fake.got(f"{run}.connect") == [call(CONFIG)]
    report = f"{run}.get_logger()"
    tracker.log({"train/loss": 0.5, "note": "fine"}, step=3)
    tracker.log({"accuracy": 0.75}, unit="share")
    scalar = {"title": "loss", "series": "train", "value": 0.5, "iteration": 3}
    assert fake.got(f"{report}.report_scalar") == [call(**scalar)]
    single = {"name": "accuracy", "value": 0.75, "unit": "share"}
    assert fake.got(f"{report}.report_single_value") == [call(**single)]
    assert fake.got(f"{report}.report_text") == [call("3: note: fine")]
    tracker.log_images({"digits": ["a.png", "b.png"]}, step=4, max_image_history=1)
    assert [kwargs for _, kwargs in fake.got(f"{report}.report_image")] == [
        {
            "title": "digits",
            "series": f"digits_{index}",
            "iteration": 4,
            "local_path": path,
            "max_image_history": 1,
        }
        for index, path in enumerate(("a.png", "b.png"))
    ]
    tracker.log_table("t", ["x"], [[1]], None, 5, url="u")
    tracker.log_table("train/t", dataframe="frame")
    assert fake.got(f"{report}.report_table") == [
        call(title="t", series="t", iteration=5, table_plot=[["x"], [1]], url="u"),
        call(title="t", series="train", iteration=None, table_plot="frame"),
    ]
    with pytest.raises(ValueError, match="dataframe"):
        tracker.log_table("t")
    assert finished(tracker, fake, f"{run}.close") == [call()]
    assert fake.got(f"{run}.mark_failed") == []


def test_a_task_of_the_scripts_own_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library(monkeypatch, "clearml")
    tracker = ClearMLTracker("mine")
    tracker.start()
    tracker.finish()
    assert fake.got("clearml.Task.init") == []
    assert fake.got("clearml.Task.current_task().close") == []


def test_dvclive(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library(monkeypatch, "dvclive")
    tracker = DVCLiveTracker("ignored", dir="here")
    tracker.start()
    assert fake.got("dvclive.Live") == []  # DVCLive empties the folder
    run = "dvclive.Live()"
    tracker.flush()
    assert fake.got("dvclive.Live") == [call(dir="here")]
    assert_is_of(tracker, run, "dir", {"dir": "a", "resume": True})
    tracker.store_init_configuration({**CONFIG, "shape": (1, 2), "kind": None})
    expected = {**CONFIG, "shape": [1, 2], "kind": None}
    assert fake.got(f"{run}.log_params") == [call(expected)]
    tracker.log(VALUES, step=3, plot=False)
    assert fake.got(f"{run}.log_metric") == [
        call("loss", 0.5, plot=False),
        call("parts/a", 1.0, plot=False),
        call("note", "fine", plot=False),
    ]
    assert fake.got(f"{run}.next_step") == [call()]
    tracker.log_images({"digits": ["a.png"]}, step=4)
    assert fake.got(f"{run}.step =") == [call(3), call(4)]
    assert fake.got(f"{run}.log_image") == [call("digits.png", "a.png")]
    assert finished(tracker, fake, f"{run}.end") == [call()]
    own = Fake("own", [], {})
    given = DVCLiveTracker(live=own)
    given.store_init_configuration(CONFIG)
    assert given.tracker is own
    assert own.got("own.log_params") == [call(CONFIG)]


def mlflow_library(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Fake:
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000)
    fake = library(monkeypatch, "mlflow", ["entities", "utils"], **answers)
    monkeypatch.setitem(sys.modules, "mlflow.utils.validation", limits)  # type: ignore[misc]
    return fake


def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none: dict[str, Any] = {"mlflow__MlflowClient()__get_experiment_by_name": None}
    fake = mlflow_library(monkeypatch, mlflow__is_tracking_uri_set=False, **none)
    arguments = {"tags": {"a": "b"}, "run_name": "mine", "description": "Text."}
    tracker = MLflowTracker("exp", tmp_path, run_id="7", nested_run=True, **arguments)
    tracker.start()
    run, client = "mlflow.start_run()", "mlflow.MlflowClient()"
    assert fake.got("mlflow.set_tracking_uri") == [call(f"sqlite:///{tmp_path}/mlflow.db")]
    created = call("exp", (tmp_path / "mlartifacts").as_uri())
    assert fake.got(f"{client}.create_experiment") == [created]
    experiment = f"{client}.create_experiment()"
    assert fake.got("mlflow.start_run") == [
        call(experiment_id=experiment, run_id="7", nested=True, **arguments)
    ]
    assert_is_of(tracker, run, "info.run_id", {"run_id": "a"})
    assert tracker.active_run is tracker.tracker
    run_id = Fake(f"{run}.info.run_id", [], {})
    tracker.store_init_configuration(CONFIG)
    assert fake.got("mlflow.entities.Param") == [
        call("optimizer/lr", "0.1"),
        call("name", "digits"),
    ]
    tracker.log(VALUES, step=3, synchronous=False)
    numbers = {"loss": 0.5, "parts/a": 1.0}
    logged = call(numbers, step=3, run_id=run_id, synchronous=False)
    assert fake.got("mlflow.log_metrics") == [logged]
    assert fake.got(f"{client}.set_tag") == [call(run_id, "note", "fine")]
    tracker.log_images({"digits": ["a"]}, step=4, timestamp=1)
    assert fake.got(f"{client}.log_image") == [call(run_id, "a", key="digits", step=4, timestamp=1)]
    tracker.log_figure("figure", "a.png", dpi=30)
    assert fake.got(f"{client}.log_figure") == [
        call(run_id, "figure", "a.png", save_kwargs={"dpi": 30})
    ]
    tracker.log_artifact("one.txt", "texts")
    assert fake.got(f"{client}.log_artifact") == [call(run_id, "one.txt", "texts")]
    tracker.log_artifacts("folder", "texts")
    assert fake.got(f"{client}.log_artifacts") == [call(run_id, "folder", "texts")]
    tracker.failed = True
    assert finished(tracker, fake, f"{client}.set_terminated") == [call(run_id, "FAILED")]


def test_a_store_that_was_chosen_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = mlflow_library(monkeypatch)
    MLflowTracker(logging_dir=tmp_path / "unused").start()
    assert fake.got("mlflow.set_tracking_uri") == []
    assert fake.got("mlflow.start_run")[0][1]["experiment_id"] is None
    assert not (tmp_path / "unused").exists()


def test_swanlab(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library(monkeypatch, "swanlab")
    tracker = SwanLabTracker("proj", mode="offline")
    tracker.start()
    assert fake.got("swanlab.init") == [call(project="proj", mode="offline")]
    run = "swanlab.init()"
    assert_is_of(tracker, run, "id", {"id": "a", "resume": "allow"})
    tracker.store_init_configuration(CONFIG)
    assert fake.got(f"{run}.config.update") == [call(CONFIG)]
    tracker.log(VALUES, step=3, more=1)
    tracker.log_images({"digits": [PIXELS]}, step=4, caption="c")
    assert fake.got("swanlab.Image")[0][1] == {"caption": "c"}
    text, image = (Fake(f"swanlab.{kind}()", [], {}) for kind in ("Text", "Image"))
    assert fake.got(f"{run}.log") == [
        call({"loss": 0.5, "parts/a": 1.0, "note": text}, step=3, more=1),
        call({"digits": [image]}, step=4),
    ]
    tracker.failed = True
    assert finished(tracker, fake, f"{run}.finish") == [call(state="crashed")]


def test_trackio(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library(monkeypatch, "trackio")
    tracker = TrackioTracker("proj", name="mine")
    tracker.start()
    assert fake.got("trackio.init") == [call(project="proj", name="mine")]
    run = "trackio.init()"
    assert_is_of(tracker, run, "name", {"name": "a", "resume": "allow"})
    tracker.store_init_configuration(CONFIG)
    assert fake.got(f"{run}.config.update") == [call(CONFIG)]
    tracker.log(VALUES, step=3, more=1)
    tracker.log_images({"one": ["a"], "two": ["b", "c"]}, step=4, caption="c")
    assert [kwargs for _, kwargs in fake.got("trackio.Image")] == [{"caption": "c"}] * 3
    image = Fake("trackio.Image()", [], {})
    assert fake.got(f"{run}.log") == [
        call({"loss": 0.5, "parts/a": 1.0, "note": "fine"}, step=3, more=1),
        call({"one": image}, step=4),
        call({"two/0": image, "two/1": image}, step=4),
    ]
    assert finished(tracker, fake, f"{run}.finish") == [call()]
