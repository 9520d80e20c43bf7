"""DVCLive: metrics, parameters and images as files (R8)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from tests.accel.trackers.offline import logged, needs


def table(name: str) -> list[dict[str, str]]:
    """Return the rows of a metric's history."""
    with Path(f"dvclive/plots/metrics/{name}.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def read(run_id: str) -> dict[str, Any]:
    """Return what lies in the folder."""
    import yaml

    folder = Path(run_id)
    return {
        "loss": table("train/loss"),
        "nested": table("parts/a"),
        "note": table("note"),
        "summary": json.loads((folder / "metrics.json").read_text()),
        "params": yaml.safe_load((folder / "params.yaml").read_text()),
        "images": sorted(path.name for path in (folder / "plots" / "images").iterdir()),
    }


@needs("dvclive")
def test_a_folder_holds_what_was_logged(tmp_path: Path) -> None:
    report = logged(tmp_path, "dvclive", f"{__name__}:read", {"save_dvc_exp": False})
    assert report["ids"] == ["dvclive", "dvclive"]
    found = report["found"]
    rows = [(row["step"], row["loss"]) for row in found["loss"]]
    assert rows == [("1", "0.5"), ("2", "0.25"), ("3", "0.125")]
    assert found["nested"] == [{"step": "2", "a": "1.0"}]
    assert found["note"] == [{"step": "1", "note": "fine"}]
    assert found["summary"]["train"] == {"loss": 0.125}
    params = {**found["params"], "layers": found["params"]["layers"]}
    assert params["optimizer"] == {"lr": 0.2, "betas": [0.9, 0.99]}
    assert params["name"] == "digits"
    assert found["images"] == ["digits_0.png", "digits_1.png"]
