"""ClearML, offline: the session that `Task.import_offline_session` uploads (R8)."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from accel.trackers.clearml import _chart
from tests.accel.trackers.offline import SECONDS, logged, needs
from tests.helpers import ROOT, python

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


DIVERGES = """
from accel import Accelerator
from tests.accel.trackers.test_clearml import read
accelerator = Accelerator(cpu=True, log_with="clearml")
accelerator.init_trackers("proj", {"lr": 0.1})
for step, loss in enumerate([1.0, float("nan"), float("inf"), -float("inf"), float("nan"), 0.0]):
    accelerator.log({"loss": loss}, step=step)
accelerator.log({"last": float("nan")})
run_id = accelerator.get_tracker("clearml").run_id
accelerator.end_training()
print([event[3:] for event in read(run_id)["events"] if event[1] == "loss"])
print([event[4] for event in read(run_id)["events"] if event[2] == "last"])
"""


@needs("clearml")
def test_values_that_are_not_finite_are_never_zero_in_silence(tmp_path: Path) -> None:
    own = {name: value.format(here=tmp_path) for name, value in ENVIRONMENT.items()}
    done = subprocess.run(
        python("-c", DIVERGES),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), **own},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()[-2:]] == [
        [[0, 1.0], [5, 0.0]],
        [],
    ]
    warnings = [line for line in done.stderr.splitlines() if "ClearML would record 0" in line]
    assert len(warnings) == 2
    assert "loss=nan (step 1)" in warnings[0]
    (archive,) = (tmp_path / "cache" / "offline").glob("*.zip")
    log = zipfile.ZipFile(archive).read("log.jsonl").decode()
    assert all(text in log for text in ("1: loss: nan", "2: loss: inf", "3: loss: -inf"))


@pytest.mark.parametrize(
    ("name", "chart"),
    [
        ("train/loss", ("loss", "train")),
        ("validation_accuracy", ("accuracy", "validation")),
        ("lr", ("lr", "lr")),
        ("trainable", ("trainable", "trainable")),
    ],
)
def test_the_splits_of_a_value_share_a_chart(name: str, chart: tuple[str, str]) -> None:
    assert _chart(name) == chart
