"""Trackio: its database, read back with SQLite (R8)."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.accel.trackers.offline import logged, needs


def read(run_id: str) -> dict[str, Any]:
    """Return what the database holds of the run."""
    with closing(sqlite3.connect("db/proj.db")) as base:
        steps = "select step, metrics from metrics where run_name = ? order by id"
        rows = base.execute(steps, [run_id]).fetchall()
        configs = base.execute("select config from configs where run_name = ?", [run_id])
        config = [json.loads(text) for (text,) in configs]
    return {
        "rows": [[step, json.loads(text)] for step, text in rows],
        "config": config,
        "images": len(list(Path("db/media").rglob("*.png"))),
    }


@needs("trackio")
def test_a_database_holds_what_was_logged(tmp_path: Path) -> None:
    report = logged(
        tmp_path, "trackio", f"{__name__}:read", environment={"TRACKIO_DIR": "{here}/db"}
    )
    assert report["ids"][0] == report["ids"][1]
    found = report["found"]
    rows = found["rows"]
    assert rows[0] == [1, {"train/loss": 0.5, "note": "fine"}]
    assert rows[1] == [2, {"train/loss": 0.25, "parts/a": 1}]
    assert sorted(rows[2][1]) == ["digits/0", "digits/1"]
    assert rows[3] == [3, {"train/loss": 0.125}]
    assert found["config"][-1]["optimizer"] == {"lr": 0.2, "betas": [0.9, 0.99]}
    assert found["images"] == 2
