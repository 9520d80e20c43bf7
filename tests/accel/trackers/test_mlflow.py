"""MLflow: a database in a folder, read back with its client (R8)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from accel.tracking import MLflowTracker
from tests.accel.trackers.offline import logged, needs
from tests.helpers import python

PLOTS = """
import sys
from pathlib import Path
from accel.tracking import MLflowTracker
from accel.machine.errors import ConfigError

tracker = MLflowTracker(
    "plots", "store", tags='{"team": "a"}', run_name="mine", description="A run.", nested_run=False
)
tracker.start()
import matplotlib
matplotlib.use("Agg")
from matplotlib.figure import Figure
figure = Figure()
figure.subplots().plot([1, 2])
tracker.log_figure(figure, "plots/loss.png", dpi=30)
Path("more").mkdir()
Path("more/a.txt").write_text("a")
Path("one.txt").write_text("one")
tracker.log_artifact("one.txt", "texts")
tracker.log_artifacts("more", "folder")
many = {f"n{i}": i for i in range(250)}
tracker.store_init_configuration({"long": "x" * 7000, "short": 1, **many})
client, run_id = tracker._client, tracker.run_id
tracker.finish()
run = client.get_run(run_id)
assert run.data.tags["team"] == "a" and run.data.tags["mlflow.note.content"] == "A run."
assert run.info.run_name == "mine" and run.info.status == "FINISHED"
assert len(run.data.params) == 251 and "long" not in run.data.params
folders = ("plots", "texts", "folder")
listed = {entry.path for folder in folders for entry in client.list_artifacts(run_id, folder)}
assert listed == {"plots/loss.png", "texts/one.txt", "folder/a.txt"}, listed
assert list(Path("store/mlartifacts").rglob("loss.png"))

child = MLflowTracker("plots", "store", run_id="0" * 32)
try:
    child.start()
except ConfigError as error:
    assert "no such run" in str(error) and "mlflow.db" in str(error), error
else:
    raise AssertionError

other = MLflowTracker("plots", "another")
other.start()
other.finish()
assert Path("another/mlflow.db").exists()
"""


def read(run_id: str) -> dict[str, Any]:
    """Return what MLflow's client finds."""
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///store/mlflow.db")
    run = client.get_run(run_id)
    history = client.get_metric_history(run_id, "train/loss")
    return {
        "loss": [(metric.step, metric.value) for metric in history],
        "nested": run.data.metrics["parts/a"],
        "params": run.data.params,
        "tags": run.data.tags,
        "status": run.info.status,
        "experiment": client.get_experiment(run.info.experiment_id).name,
        "images": [file.path for file in client.list_artifacts(run_id, "images")],
    }


@needs("mlflow")
def test_a_store_holds_what_was_logged(tmp_path: Path) -> None:
    report = logged(tmp_path, "mlflow", f"{__name__}:read", {"logging_dir": "store"})
    assert report["ids"][0] == report["ids"][1]
    found = report["found"]
    assert found["loss"] == [[1, 0.5], [2, 0.25], [3, 0.125]]
    assert (found["nested"], found["status"], found["experiment"]) == (1.0, "FINISHED", "proj")
    assert found["params"] == {
        "optimizer/lr": "0.1",
        "optimizer/betas": "[0.9, 0.99]",
        "name": "digits",
        "layers": "None",
    }
    assert (found["tags"]["note"], found["tags"]["resumed/optimizer/lr"]) == ("fine", "0.2")
    assert {name.partition("+")[0].partition("~")[0] for name in found["images"]} == {
        "images/digits"
    }


@needs("mlflow")
def test_figures_artifacts_and_the_arguments_of_a_run(tmp_path: Path) -> None:
    done = subprocess.run(python("-c", PLOTS), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_variables_override_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"EXPERIMENT_NAME": "of-env", "RUN_ID": "abc", "TAGS": '{"a": "b"}', "NESTED_RUN": "1"}
    for name, value in values.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    tracker = MLflowTracker("mine", run_id="mine", tags={"c": "d"})
    assert tracker.experiment_name == "of-env"
    assert tracker._arguments["run_id"] == "abc"
    assert tracker._arguments["tags"] == {"a": "b"}
    assert tracker._arguments["nested"] is True
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "perhaps")
    with pytest.raises(ConfigError, match="MLFLOW_NESTED_RUN"):
        MLflowTracker("mine")
