"""ClearML, offline: the session that `Task.import_offline_session` uploads (R8)."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from tests.accel.trackers.offline import logged, needs

ENVIRONMENT = {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": "{here}/cache"}


def read(run_id: str) -> dict[str, Any]:
    """Return what the session's zip file holds."""
    with zipfile.ZipFile(f"cache/offline/{run_id}.zip") as archive:
        names = archive.namelist()
        task = json.loads(archive.read("task.json"))
        lines = archive.read("metrics.jsonl").decode().splitlines()
        log = archive.read("log.jsonl").decode()
    events = [event for line in lines for event in json.loads(line)]
    return {
        "events": [
            [event["type"], event["metric"], event["variant"], event["iter"], event.get("value")]
            for event in events
        ],
        "params": {name: p["value"] for name, p in task["hyperparams"]["General"].items()},
        "names": [task["project_name"], task["name"]],
        "images": sum("digits_digits" in name for name in names),
        "noted": "1: note: fine" in log,
        "tables": [event["plot_str"] for event in events if event["metric"] == "table"],
    }


@needs("clearml")
def test_an_offline_session_holds_what_was_logged(tmp_path: Path) -> None:
    report = logged(tmp_path, "clearml", f"{__name__}:read", environment=ENVIRONMENT)
    assert report["ids"][0] == report["ids"][1]
    found = report["found"]
    scalars = [event[1:] for event in found["events"] if event[0] == "training_stats_scalar"]
    for event in (
        ["loss", "train", 1, 0.5],
        ["loss", "train", 2, 0.25],
        ["loss", "train", 3, 0.125],
    ):
        assert event in scalars
    assert ["parts/a", "parts/a", 2, 1.0] in scalars
    assert (found["params"]["name"], found["params"]["optimizer/lr"]) == ("digits", "0.2")
    assert (found["names"], found["images"], found["noted"]) == (["proj", "proj"], 2, True)
    assert '"x"' in found["tables"][0]
