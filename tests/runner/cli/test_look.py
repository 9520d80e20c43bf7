"""`runner list`, `show`, `compare` and `report`: arguments, output, speed, and no torch.

Holds L1.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner import cli
from tests.runner.written_runs import session_of, write_failure, write_run, write_sweep

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "digits"
    write_run(folder / "20260101-120000-aaaa", {"optimizer.lr": 0.01}, best=0.4)
    failed = write_run(folder / "20260101-120001-bbbb", summary=False)
    write_failure(failed)
    (folder / "20260101-120002-cccc").mkdir()
    return folder


def printed(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert cli.main(list(arguments)) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_runs_of_the_working_directory_are_listed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed("list", capsys=capsys)
    assert out.rstrip().endswith("3 of 3 runs in runs")
    for status in ("finished", "failed", "broken"):
        assert status in out
    assert "runs/digits/20260101-120000-aaaa" in out


def test_folders_and_filters_stand_side_by_side(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed("list", str(runs), "status=failed", "--json", capsys=capsys)
    (one,) = json.loads(out)
    assert (one["status"], one["reason"]) == ("failed", "ValueError: no")
    out = printed("list", "objective<0.5", str(runs), "--columns", "optimizer.lr", capsys=capsys)
    assert "1 of 3 runs" in out
    assert "0.01" in out
    out = printed("list", "--json", "--sort", "objective", "--limit", "1", capsys=capsys)
    assert "aaaa" in json.loads(out)[0]["directory"]
    assert "1 of 3 runs in runs; --limit 0 shows all" in printed(
        "list", "--limit", "1", capsys=capsys
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "nowhere"), "there is no such folder"),
        (("list", "stauts=failed"), "Did you mean 'status'"),
        (("list", "status=fail"), "Did you mean 'failed'"),
        (("list", "optimizer.lrr=1"), "Did you mean 'optimizer.lr'"),
        (("list", "--sort", "losss"), "has such a key"),
        (("show", "."), "no run lies there"),
        (("show",), "required: RUN_DIR"),
        (("compare", "runs/digits/20260101-120000-aaaa"), "two runs or more"),
        (("report", "status=failed"), "Name one"),
        (("report", "runs", "status=pruned"), "no run fulfills"),
        (("report", "runs", "--output", "no/where.html"), "a folder that exists"),
        (("report", "runs", "--output", "report.pdf"), "a report is a page in HTML (.html or"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(
    arguments: tuple[str, ...], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs.parents[1] / "empty").mkdir()
    if arguments == ("show", "."):
        arguments = ("show", "empty")
    assert message in printed(*arguments, capsys=capsys, code=2)


def test_runs_are_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("show", str(runs), capsys=capsys)
    assert "ValueError: no" in out
    assert "broken" in out
    found = json.loads(printed("show", str(next(runs.iterdir())), "--json", capsys=capsys))
    assert found["name"] == "digits"


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path)
    out = printed("compare", str(sweep / "0000"), str(sweep / "0004"), capsys=capsys)
    assert "optimizer.lr" in out
    assert "model.width" not in out
    out = printed("compare", str(sweep), "--json", capsys=capsys)
    assert len(json.loads(out)["runs"]) == 12


@pytest.mark.parametrize(
    ("name", "keep", "said"),
    [
        ("config.yaml", 0.0, "config.yaml is missing or no recipe"),
        ("environment.json", 0.0, "environment.json is damaged"),
        ("environment.json", None, "environment.json is damaged (it is no mapping)"),
        ("ended.json", 0.5, "ended.json is damaged"),
    ],
)
def test_damaged_runs_are_marked(
    name: str, keep: float | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "a", metrics=3)
    assert "damaged" not in printed("list", capsys=capsys)
    file = session_of(run) / name
    content = file.read_bytes()
    file.write_bytes(b"[1]" if keep is None else content[: int(len(content) * keep)])
    assert said in printed("list", capsys=capsys)
    assert said in printed("show", "runs/a", capsys=capsys)


def test_a_page_is_written_of_chosen_runs_or_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, output = write_sweep(tmp_path), tmp_path / "mine.html"
    assert cli.main(["report", str(sweep), "model.width=16", "--output", str(output)]) == 0
    assert "6 runs" in capsys.readouterr().out
    assert output.is_file()
    assert not (sweep / "report.html").exists()
    assert cli.main(["report", str(sweep)]) == 0
    assert (sweep / "report.html").is_file()
