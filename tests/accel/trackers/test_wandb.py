"""Weights & Biases, offline: the transaction log that `wandb sync` uploads (R8)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.accel.trackers.offline import logged, needs

BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run: protocol buffers of wandb's in LevelDB's log format.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        part += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last fragment
            yield Record.FromString(part)
            part = b""


def items(entries: Any) -> dict[str, Any]:
    """Return items of a record as values by name."""
    return {e.key or "/".join(e.nested_key): json.loads(e.value_json) for e in entries}


def read(run_id: str) -> dict[str, Any]:
    """Return rows, configurations and exit codes of the run, of both processes."""
    import wandb

    wandb.teardown()  # waits for its service, which writes the end of the file after `finish`
    found: dict[str, Any] = {"rows": [], "configs": [], "exits": [], "projects": []}
    for path in sorted(Path("wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = items(record.history.item)
                found["rows"].append({k: v for k, v in row.items() if k not in ("_timestamp",)})
            elif kind == "config":
                found["configs"].append(items(record.config.update))
            elif kind == "exit":
                found["exits"].append(record.exit.exit_code)
            elif kind == "run":
                found["projects"].append(record.run.project)
    tables = Path("wandb").rglob("table_*.table.json")
    found["tables"] = [json.loads(path.read_text()) for path in tables]
    found["images"] = len(list(Path("wandb").rglob("digits_2_*.png")))
    return found


@needs("wandb")
def test_an_offline_run_holds_what_was_logged(tmp_path: Path) -> None:
    report = logged(tmp_path, "wandb", f"{__name__}:read", {"mode": "offline"})
    assert report["ids"][0] == report["ids"][1]
    found = report["found"]
    rows = {row["_step"]: row for row in found["rows"]}
    assert [rows[step]["train/loss"] for step in (1, 2, 3)] == [0.5, 0.25, 0.125]
    assert (rows[1]["note"], rows[2]["parts/a"]) == ("fine", 1)
    assert rows[2]["digits/count"] == 2
    assert found["images"] == 2
    assert (found["tables"][0]["columns"], found["tables"][0]["data"]) == (
        ["x", "y"],
        [[1, 2], [3, 4]],
    )
    assert [config["optimizer"]["lr"] for config in found["configs"]] == [0.1, 0.2]
    assert found["exits"] == [1, 0]
    assert found["projects"] == ["proj", "proj"]
