"""L1: the page of `runner report` is complete, self-contained, and nobody's HTML but ours."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import MissingPackageError
from runner.reporting import html_page
from runner.reporting.html_page import Report
from runner.runs import record
from runner.runs.record import RunRecord
from tests.runner.written_runs import (
    change_summary,
    session_of,
    write_failure,
    write_run,
    write_sweep,
)


def read(folder: Path) -> Report:
    return html_page.read(record.find_runs([folder]))


def rows(folder: Path, label: str) -> list[list[str]]:
    """Return the cells of the rows that begin with a label."""
    text = re.sub(r"<[^>]*>", "", html_page.page("", read(folder)))
    return [line.split() for line in text.splitlines() if line.split()[:1] == [label]]


def test_the_page_of_a_sweep(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    failed = write_run(sweep / "0012", {"model.width": 99}, summary=False)
    write_failure(failed, "ValueError: no")
    for number in range(11):  # damages: the first ten are named
        (session_of(sweep / f"{number:04}") / "environment.json").write_text("{")
    (session_of(failed) / "config.yaml").write_text("name: <script>alert(1)</script>")
    text = html_page.page("runs & <more>", read(tmp_path))
    assert "<script" not in text
    assert "&lt;script&gt;alert" in text
    assert "runs &amp; &lt;more&gt;" in text
    assert "13 runs: 12 finished, 1 failed" in text
    assert text.count("environment.json is damaged") == 10
    assert "(damaged)" in text
    addresses = re.findall(r'(?:src|href)="([^"]{,22})', text)
    assert addresses == ["data:image/png;base64,"] * 2  # nothing is loaded
    assert not re.search(r"url\(|@import", text)
    assert len(text) < 1_000_000


def test_runs_without_anything_make_a_page(tmp_path: Path) -> None:
    (tmp_path / "20260101-120000-aaaa").mkdir()
    write_run(tmp_path / "b", summary=False, best=None)
    assert "No run has measured an objective." in html_page.page("", read(tmp_path))


def test_a_page_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match=r"accel-runner\[report\]"):
        html_page.require_matplotlib()


def test_curves_are_read_by_split_and_metric(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", metrics=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "split": "train", "loss": "NaN"}\nnot json\n[1]\n{"step": 50, "sp')
    found = html_page.read_curves(RunRecord(path))
    assert set(found) == {"train/loss", "validation/loss"}
    steps, values = found["train/loss"]
    assert steps == [10, 20, 30, 40]
    assert math.isnan(values[-1])
    assert html_page.learning_curves("loss", {"_$x_<&> $": [(steps, values), ([10], [1])]})


def test_a_sweep_is_read_with_the_best_run_first(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    found = read(sweep)
    assert sorted(found.keys) == ["model.width", "optimizer.lr"]
    assert [run.path.name for run in found.runs[:2]] == ["0006", "0007"]
    assert list(found.curves) == ["validation/loss", "train/loss"]
    assert next(iter(found.groups)) == "model.width=32 optimizer.lr=0.003"
    for groups in (found.groups, *found.curves.values()):
        assert [len(members) for members in groups.values()] == [2] * 6
    command = f"runner again {sweep / '0006'}"
    assert command in html_page.page("", found)


def test_a_seed_counts_once_with_its_newest_finished_run(tmp_path: Path) -> None:
    for number, (seed, best) in enumerate(((0, 0.1), (0, 0.2), (1, 0.4))):
        values = {"seed": seed, "model.width": 16}
        write_run(tmp_path / f"{number}", values, best=best, started=1e9 + number)
    write_run(tmp_path / "3", {"seed": 1, "model.width": 16}, summary=False, started=2e9)
    write_run(tmp_path / "4", {"model.width": 99}, best=0.5)
    assert rows(tmp_path, "model.width=16") == [["model.width=16", "4", "2", "0.3000", "0.1414"]]
    assert rows(tmp_path, "model.width=99") == [["model.width=99", "1", "1", "0.5000"]]


def test_runs_of_different_code_are_not_averaged(tmp_path: Path) -> None:
    git = {"sha": "a" * 40, "branch": "main", "dirty": False}
    changed = {**git, "dirty": True, "diff_sha256": "d" * 64}
    for number, state in enumerate((git, git, changed, {**git, "branch": "side"})):
        write_run(tmp_path / f"{number}", {"seed": number}, best=0.1 * number, git=state)
    found = read(tmp_path)
    assert found.keys == ["code"]
    assert sorted(len(runs) for runs in found.groups.values()) == [1, 3]


def test_objectives_of_different_metrics_are_not_compared(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{n}", best=0.5 - n / 10) for n in range(3)]
    change_summary(folders[0], metric="accuracy", mode="max")
    assert [run.path.name for run in read(tmp_path).runs] == ["2", "1", "0"]
    assert rows(tmp_path, "digits")[0] == ["digits", "3", "1", "0.3000"]


def test_where_factories_differ_their_own_arguments_are_no_keys(tmp_path: Path) -> None:
    nodes: list[tuple[dict[str, Any], list[str]]] = [
        ({"name": "adamw", "lr": 0.1, "betas": [0.9, 0.999]}, []),
        ({"name": "sgd", "lr": 0.2, "momentum": 0.9}, ["optimizer=sgd", "optimizer.lr=0.2"]),
    ]
    for number, (node, overrides) in enumerate(nodes):
        write_run(tmp_path / f"{number}", {"optimizer": node}, overrides=overrides)
    found = read(tmp_path)
    assert found.keys == ["optimizer.name", "optimizer.lr"]
    assert "optimizer.name=sgd optimizer.lr=0.2" in found.groups


def test_where_a_run_is_computed_is_no_cause_of_its_objective(tmp_path: Path) -> None:
    place = {"distributed.max_restarts": 3, "submit.nodes": 2, "dataloader.num_workers": 2}
    for number, values in enumerate(({"optimizer.lr": 0.5}, place)):
        write_run(tmp_path / f"{number}", values)
    assert read(tmp_path).keys == ["optimizer.lr"]


def test_the_page_of_a_run_shows_where_its_time_went(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        for step in (30, 40):
            shares = {"time/data": 0.3, "time/other": 0.7}
            file.write(json.dumps({"step": step, "split": "train", **shares}) + "\n")
    text = html_page.page("", read(tmp_path))
    assert f"<h2>time of {path}</h2>\n<p>1.5k samples/s: data 33%, other 67%</p>\n<img" in text
