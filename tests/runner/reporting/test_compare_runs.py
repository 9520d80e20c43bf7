"""L1: `runner compare` shows what differs, and only that."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from runner.reporting import compare_runs
from runner.runs.record import MISSING, RunRecord
from tests.runner.written_runs import session_of, write_run

GIT = {"sha": "b" * 40, "branch": "main", "dirty": False}


def runs(folder: Path, number: int = 2) -> list[RunRecord]:
    return [
        RunRecord(
            write_run(
                folder / "runs" / f"r{n}",
                {"optimizer.lr": 0.01 * (n + 1)},
                best=0.1 * (n + 1),
                packages={"torch": f"2.{n}", "numpy": "2"},
                git={**GIT, "dirty": n > 0, "diff_sha256": f"{n}" * 64} if n else GIT,
            )
        )
        for n in range(number)
    ]


def shown(found: compare_runs.Compared) -> str:
    out = io.StringIO()
    compare_runs.show(found, Console(file=out, width=300))
    return out.getvalue()


def test_only_differences_are_shown_by_section(tmp_path: Path) -> None:
    found = compare_runs.compare(runs(tmp_path))
    assert found.names == ["r0", "r1"]
    assert found.rows["recipe"] == [("optimizer.lr", [0.01, 0.02])]
    assert found.rows["versions"] == [("torch", ["2.0", "2.1"])]
    assert found.rows["machine"] == []
    assert ("uncommitted changes", ["none", "11111111"]) in found.rows["code"]
    keys = dict(found.rows["result"])
    assert keys["best validation loss"] == [0.1, 0.2]
    assert "status" not in keys
    text = shown(found)
    assert "numpy" not in text
    assert "1 of versions" in text
    content = json.loads(compare_runs.as_json(found))
    assert content["recipe"] == {"optimizer.lr": [0.01, 0.02]}


def test_data_that_has_changed_behind_a_recipe_is_a_difference(tmp_path: Path) -> None:
    found = {"path": "/d.csv", "files": 1, "bytes": 9, "newest": 60.0}
    both = [
        RunRecord(write_run(tmp_path / name, {}, data={"data.path": {**found, "bytes": size}}))
        for name, size in (("a", 9), ("b", 12))
    ]
    ((key, values),) = compare_runs.compare(both).rows["data"]
    assert key == "files of data.path"
    assert [value.partition(",")[0] for value in values] == [
        "1 file of 9 bytes",
        "1 file of 12 bytes",
    ]


def test_equal_runs_are_said_to_be_equal(tmp_path: Path) -> None:
    run = runs(tmp_path, 1)[0]
    found = compare_runs.compare([run, run])
    assert "do not differ" in shown(found)


def test_a_key_that_a_run_lacks_is_a_dash(tmp_path: Path) -> None:
    other = RunRecord(write_run(tmp_path / "other", {"mine": 1}))
    found = compare_runs.compare([*runs(tmp_path, 1), other])
    assert ("mine", [MISSING, 1]) in found.rows["recipe"]
    assert "–" in shown(found)
    assert json.loads(compare_runs.as_json(found))["recipe"]["mine"] == [None, 1]


def test_a_recipe_that_cannot_be_read_is_named_and_not_compared(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    found = compare_runs.compare([*runs(tmp_path, 2), RunRecord(tmp_path / "broken")])
    assert found.rows["recipe"] == []
    assert "broken: config.yaml is missing" in shown(found)


def test_a_damaged_run_is_shown_as_such(tmp_path: Path) -> None:
    found = runs(tmp_path)
    (session_of(found[0].path) / "ended.json").write_text("")
    compared = compare_runs.compare(found)
    status = dict(compared.rows["result"])["status"]
    assert status[0].endswith(" (damaged)")
    assert status[1] == "finished"
    text = shown(compared)
    assert "r0: sessions/0001/ended.json is damaged" in text
    assert "null" not in text
    assert json.loads(compare_runs.as_json(compared))["problems"][1] == []
