"""L1: `runner compare` shows what differs, and only that."""

from __future__ import annotations

from pathlib import Path

from runner.reporting import compare_runs
from runner.runs.record import RunRecord
from tests.runner.reporting.printed import printed
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


def test_only_differences_are_shown_by_section(tmp_path: Path) -> None:
    found = compare_runs.compare(runs(tmp_path))
    assert found["recipe"] == {"optimizer.lr": [0.01, 0.02]}
    assert found["versions"] == {"torch": ["2.0", "2.1"]}
    assert found["machine"] == {}
    assert found["code"]["git.diff_sha256"] == [None, "1" * 64]
    assert found["result"]["objective"] == [0.1, 0.2]
    assert "status" not in found["result"]
    text = printed(compare_runs.show, found)
    assert text.split()[:2] == ["r0", "r1"]
    assert "numpy" not in text


def test_data_that_has_changed_behind_a_recipe_is_a_difference(tmp_path: Path) -> None:
    found = {"path": "/d.csv", "files": 1, "bytes": 9, "newest": 60.0}
    both = [
        RunRecord(write_run(tmp_path / name, {}, data={"data.path": {**found, "bytes": size}}))
        for name, size in (("a", 9), ("b", 12))
    ]
    assert compare_runs.compare(both)["data"] == {"data.path.bytes": [9, 12]}


def test_equal_runs_are_said_to_be_equal(tmp_path: Path) -> None:
    found = compare_runs.compare(runs(tmp_path, 1) * 2)
    assert "do not differ" in printed(compare_runs.show, found)


def test_a_key_that_a_run_lacks_is_a_dash(tmp_path: Path) -> None:
    other = RunRecord(write_run(tmp_path / "other", {"mine": 1}))
    found = compare_runs.compare([*runs(tmp_path, 1), other])
    assert found["recipe"]["mine"] == [None, 1]
    assert "–" in printed(compare_runs.show, found)


def test_what_is_damaged_is_named_and_its_recipe_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    damaged, whole = runs(tmp_path)
    (session_of(damaged.path) / "ended.json").write_text("")
    found = compare_runs.compare([damaged, whole, RunRecord(tmp_path / "broken")])
    assert found["recipe"] == {}
    assert found["result"]["status"] == ["interrupted (damaged)", "finished", "broken"]
    assert found["problems"][1] == []
    text = printed(compare_runs.show, found)
    assert "broken: config.yaml is missing" in text
    assert "runs/r0: sessions/0001/ended.json is damaged" in text
