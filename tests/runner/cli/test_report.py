"""`runner report` as a command (L1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import cli
from tests.runner.written_runs import write_sweep

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.slow
def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path)
    assert cli.main(["report", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "report.html" in out
    assert "12 runs: 12 finished" in out
    assert (sweep / "report.html").read_text().startswith("<!doctype html>")
    # A report lies beside runs, and is none.
    assert cli.main(["list", str(sweep)]) == 0
    assert "12 runs" in capsys.readouterr().out


def test_a_page_of_chosen_runs_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, output = write_sweep(tmp_path), tmp_path / "mine.html"
    assert cli.main(["report", str(sweep), "model.width=16", "--output", str(output)]) == 0
    assert "6 runs" in capsys.readouterr().out
    assert output.is_file()
    assert not (sweep / "report.html").exists()


def test_a_page_of_another_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_sweep(tmp_path)
    assert cli.main(["report", str(sweep), "--output", str(tmp_path / "rep.pdf")]) == 2
    told = capsys.readouterr().err
    assert "a report is a page in HTML (.html or .htm)" in told
    assert f"Give --output {tmp_path / 'rep.html'}." in told
    assert not list(tmp_path.glob("rep*"))
