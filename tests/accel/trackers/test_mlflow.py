"""MLflow: a database in a folder, read back with its client (R8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from accel.tracking import MLflowTracker
from tests.accel.trackers.offline import logged, needs


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
