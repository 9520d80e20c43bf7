"""S2, S3: the end of a sweep's command."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from accel.checkpoint import directory as checkpoints
from runner import cli
from tests.runner.sweep import stand_ins
from tests.runner.sweep.stand_ins import StandIn

pytestmark = pytest.mark.usefixtures("elsewhere")
LINE = ["-m", "seed=1,2", "optimizer.lr=0.5"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_ins.installed(monkeypatch)


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full for the results, though not for the sweep's description."""
    real = checkpoints.write_atomically

    def full(path: Path, content: bytes) -> None:
        if path.name == "results.csv":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(checkpoints, "write_atomically", full)


@pytest.mark.parametrize("failed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_results_that_cannot_be_written_hide_no_table_and_no_failures(
    failed: bool,
    server: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without_room(monkeypatch)
    server.codes = {1: 2} if failed else {}
    assert cli.main(LINE) == 1
    shown = capsys.readouterr()
    assert "best: job 0000" in shown.out
    assert "Warning: results.csv is not written: the disk is full: [Errno 28]" in shown.err
    assert ("1 of 2 jobs failed: 0001" in shown.err) is failed
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("codes", "expected"), [({0: 75}, 75), ({0: 75, 1: 2}, 1), ({0: 130, 1: 1}, 1)]
)
def test_a_failed_job_is_hidden_by_no_other(
    codes: dict[int, int], expected: int, server: StandIn
) -> None:
    server.codes = codes
    assert cli.main(LINE) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_objective_that_is_no_number_is_no_success(
    value: float, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    server.objectives = {0: value, 1: 0.5}
    for _ in range(2):  # the second time nothing is left to do
        assert cli.main(LINE) == 1
        shown = capsys.readouterr()
        assert "best: job 0001" in shown.out
        assert "1 of 2 jobs finished, but their objectives are no finite numbers" in shown.err
        assert "train them: 0000" in shown.err


@pytest.mark.slow
def test_where_nothing_has_changed_nothing_needs_to_be_written(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(LINE) == 0

    def cannot(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoints, "write_atomically", cannot)
    assert cli.main(LINE) == 0
    assert "Warning" not in capsys.readouterr().err
