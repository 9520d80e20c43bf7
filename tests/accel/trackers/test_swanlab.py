"""SwanLab, offline: the files that `swanlab sync` uploads (R8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.accel.trackers.offline import logged, needs


def read(run_id: str) -> dict[str, Any]:
    """Return records, configurations and media of the run, of both processes."""
    import yaml
    from google.protobuf.json_format import MessageToDict
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: dict[str, Any] = {"records": [], "configs": []}
    folders = sorted(Path("swanlog").glob(f"run-*-{run_id}"))
    for folder in folders:
        reader = DataStoreReader()
        reader.open(folder / f"run-{run_id}.swanlab")
        found["records"] += [MessageToDict(Record.FromString(record)) for record in reader]
        reader.close()
        found["configs"].append(yaml.safe_load((folder / "files" / "config.yaml").read_text()))
    found["media"] = sorted(path.suffix for path in Path("swanlog").rglob("media/*/*"))
    return found


@needs("swanlab")
def test_an_offline_run_holds_what_was_logged(tmp_path: Path) -> None:
    arguments = {"mode": "offline"}
    report = logged(tmp_path, "swanlab", f"{__name__}:read", arguments)
    assert report["ids"][0] == report["ids"][1]
    found = report["found"]
    scalars = [record["scalar"] for record in found["records"] if "scalar" in record]
    values = [(entry["key"], int(entry["step"]), entry["value"]["number"]) for entry in scalars]
    assert [entry[1:] for entry in values if entry[0] == "train/loss"] == [
        (1, 0.5),
        (2, 0.25),
        (3, 0.125),
    ]
    assert ("parts/a", 2, 1.0) in values
    ends = [record["finish"]["state"] for record in found["records"] if "finish" in record]
    assert ends == ["RUN_STATE_CRASHED", "RUN_STATE_FINISHED"]
    starts = [record["start"]["project"] for record in found["records"] if "start" in record]
    assert starts == ["proj", "proj"]
    assert [config["optimizer"]["value"]["lr"] for config in found["configs"]] == [0.1, 0.2]
    assert found["media"] == [".png", ".png", ".txt"]
