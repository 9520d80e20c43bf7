"""Comet, offline: the zip files that `comet upload` uploads (R8)."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from tests.accel.trackers.offline import logged, needs


def read(run_id: str) -> dict[str, Any]:
    """Return the messages of the experiment, of both processes, in the order of writing."""
    found: dict[str, Any] = {"metrics": [], "params": [], "others": {}, "uploads": []}
    paths = sorted(Path(".cometml-runs").glob(f"{run_id}*.zip"), key=lambda p: p.stat().st_mtime)
    found["modes"] = []
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            found["modes"].append(json.loads(archive.read("experiment.json"))["resume_strategy"])
            lines = archive.read("messages.json").decode().splitlines()
        for message in map(json.loads, lines):
            content = message["payload"]
            if message["type"] == "metric_msg":
                metric = content["metric"]
                found["metrics"].append(
                    [metric["metricName"], metric["step"], metric["metricValue"]]
                )
            elif message["type"] == "parameter_msg":
                param = content.get("param") or content["params"]
                found["params"].append([param["paramName"], param["paramValue"]])
            elif message["type"] == "log_other":
                found["others"][content["key"]] = content["value"]
            elif message["type"] == "file_upload":
                found["uploads"].append(content["upload_type"])
    return found


@needs("comet_ml")
def test_an_offline_experiment_holds_what_was_logged(tmp_path: Path) -> None:
    arguments = {"online": False}
    report = logged(tmp_path, "comet_ml", f"{__name__}:read", arguments)
    assert report["ids"][0] == report["ids"][1]
    found = report["found"]
    losses = [entry[1:] for entry in found["metrics"] if entry[0] == "train/loss"]
    assert losses == [[1, 0.5], [2, 0.25], [3, 0.125]]
    assert ["parts/a", 2, 1.0] in found["metrics"]
    for entry in (["optimizer|lr", 0.1], ["optimizer|betas", [0.9, 0.99]], ["name", "digits"]):
        assert entry in found["params"]
    assert ["optimizer|lr", 0.2] in found["params"]
    assert found["others"]["note"] == "fine"
    assert found["uploads"].count("visualization") == 2
    assert found["modes"] == ["get_or_create", "get_or_create"]
