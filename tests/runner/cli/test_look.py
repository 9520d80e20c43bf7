"""`runner list`, `runner show` and `runner compare`: arguments, output, speed, and no torch.

Holds L1.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import cli
from tests.runner.written_runs import STARTED, write_failure, write_run, write_sweep

pytestmark = pytest.mark.usefixtures("elsewhere")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "digits"
    write_run(folder / "20260101-120000-aaaa", {"optimizer.lr": 0.01}, best=0.4)
    failed = write_run(folder / "20260101-120001-bbbb", summary=False)
    write_failure(failed, 9e9, "ValueError: no")
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
    assert out.rstrip().endswith("3 runs in runs")
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
    out = printed("list", "--csv", "--sort", "objective", "--limit", "1", capsys=capsys)
    assert len(out.splitlines()) == 2
    assert "aaaa" in out
    assert "1 are shown, --limit 0 shows all" in printed("list", "--limit", "1", capsys=capsys)


def test_without_runs_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("list", capsys=capsys) == "no runs in runs\n"
    assert printed("list", "--json", capsys=capsys) == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "nowhere"), "there is no such folder"),
        (("list", "stauts=failed"), "Did you mean 'status'"),
        (("list", "status=fail"), "Did you mean 'failed'"),
        (("list", "--sort", "losss"), "has such a key"),
        (("list", "--json", "--csv"), "not allowed with"),
        (("show", "."), "no run lies there"),
        (("show",), "required: RUN_DIR"),
        (("compare", "runs/digits/20260101-120000-aaaa"), "two runs or more"),
        (("report", "status=failed"), "Name one"),
        (("report", "runs", "status=pruned"), "no run fulfills"),
        (("report", "runs", "--output", "no/where.html"), "a folder that exists"),
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
    assert "optimizer.lr=0.01  (default 0.005)" in out
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


PROBE = """
import sys
from runner import cli
code = cli.main(sys.argv[1:])
heavy = [name for name in ("torch", "matplotlib", "sklearn", "numpy") if name in sys.modules]
print("code", code, "heavy", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["list", "show", "compare"])
def test_no_torch_is_imported(command: str, runs: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROBE, command, str(runs)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert answer.stderr == "code 0 heavy []\n"


def test_a_thousand_runs_are_listed_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_run(tmp_path / "many" / "20260101-120000-0000", metrics=5)
    for number in range(1, 1000):
        shutil.copytree(first, first.with_name(f"20260101-12{number:04}-{number:04x}"))
    began = time.process_time()
    out = printed("list", str(tmp_path / "many"), "optimizer.lr=0.005", "tag!=x", capsys=capsys)
    assert "1000 runs" in out
    assert time.process_time() - began < 2.0


@pytest.mark.slow
def test_a_run_without_recipe_takes_no_part_in_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.reporting import html_page, swept_keys
    from runner.run_dir import discovery

    sweep = write_sweep(tmp_path)
    for name in ("config.yaml", "job.json"):
        (sweep / "0003" / name).write_text("")
    compared = json.loads(printed("compare", str(sweep), "--json", capsys=capsys))
    swept = {"optimizer.lr", "model.width", "seed"}
    assert set(compared["recipe"]) == {"the recipe itself", *swept}
    assert compared["recipe"]["the recipe itself"].count("unreadable") == 1
    runs = discovery.find_runs([sweep])
    assert set(html_page.read(runs).keys) == swept - {swept_keys.SEED}


@pytest.mark.parametrize(
    ("name", "keep", "said"),
    [
        ("config.yaml", 0.0, "config.yaml is missing or empty"),
        ("environment.json", 0.0, "environment.json is damaged"),
        ("environment.json", None, "environment.json is damaged (it is no mapping)"),
        ("summary.json", 0.5, "summary.json is damaged"),
    ],
)
def test_damaged_runs_are_marked(
    name: str, keep: float | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "a", metrics=3)
    assert "damaged" not in printed("list", capsys=capsys)
    content = (run / name).read_bytes()
    (run / name).write_bytes(b"[1]" if keep is None else content[: int(len(content) * keep)])
    assert f"runs/a: {said}" in printed("list", capsys=capsys)
    assert said in printed("show", "runs/a", capsys=capsys)


def test_a_torn_line_of_a_killed_run_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = write_run(tmp_path / "runs" / "a", summary=False, metrics=3) / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b'{"step": 9')
    assert "damaged" not in printed("list", capsys=capsys)


def test_what_is_no_recipe_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("services: [web]\n")
    out = printed("list", capsys=capsys)
    assert "broken" in out
    assert "config.yaml is no recipe" in out
    assert "config.yaml is no recipe" in printed("show", "runs/a", capsys=capsys)


def test_killed_jobs_of_a_sweep_have_failed_as_its_journal_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.sweep.journal import Journal

    sweep = write_sweep(tmp_path / "runs")
    (sweep / "0003" / "summary.json").unlink()
    lines = (sweep / "journal.jsonl").read_text().splitlines(keepends=True)
    (sweep / "journal.jsonl").write_text("".join(line for line in lines if '"job": 3' not in line))
    how = "its process was ended by SIGKILL (out of memory?)"
    begun = {"event": "started", "job": 3, "time": STARTED + 3, "attempt": "a"}
    end = {"status": "failed", "reason": how, "time": STARTED + 90}
    journal = Journal(sweep)
    for record in (begun, {**begun, "event": "ended", **end}):
        journal.append(record)
    listed = printed("list", str(sweep), "status=failed", capsys=capsys)
    assert f"{sweep.name}/0003" in listed
    assert "1 of 12 runs" in listed
    assert f"failed  {how}" in printed("show", str(sweep / "0003"), capsys=capsys)
    journal.append({**begun, "attempt": "b"})  # it was killed, and the sweep with it
    assert "interrupted" in printed("show", str(sweep / "0003"), capsys=capsys)


def test_a_sweep_within_a_sweep_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = write_sweep(tmp_path / "runs", (0.1,))
    inner = outer / "rel" / "sw"
    shutil.copytree(outer, inner)
    assert "8 runs in runs" in printed("list", capsys=capsys)
    assert "8 runs in" in printed("list", str(outer), capsys=capsys)


def test_keys_that_the_chosen_factory_lacks_are_no_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "a", {"data": {"name": "other", "augment": None}})
    out = printed("show", "runs/a", capsys=capsys)
    assert "data.name=other" in out
    lines = [line for line in out.splitlines() if "data." in line and "=null" in line]
    assert len(lines) <= 1  # the key that the recipe has


def test_nan_is_written_in_one_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        run = write_run(tmp_path / "runs" / name, {"optimizer.lr": rate}, best=0.1 + rate)
        summary = json.loads((run / "summary.json").read_text())
        if name == "a":
            summary["best"]["value"] = summary["metrics"]["validation"]["loss"] = "NaN"
            (run / "summary.json").write_text(json.dumps(summary))
    out = printed("compare", "runs", capsys=capsys)
    assert "nan" in out
    assert "NaN" not in out
