"""L1: a run as its files describe it: its status above all, also where files are damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.runs import lock, record
from runner.runs.record import MISSING, RunRecord
from tests.runner.written_runs import failure, write_failure, write_run, write_session, write_sweep


def test_a_finished_run(tmp_path: Path) -> None:
    run = RunRecord(write_run(tmp_path / "a", {"tags": ["x"], "optimizer.lr": 1e-05}, best=0.25))
    assert (run.status, run.name, run.tags) == ("finished", "digits", ["x"])
    assert (run.step, run.seconds) == (20, 90.0)
    assert run.objective == record.Objective("loss", "min", 0.25)
    assert run.value("optimizer.lr") == 1e-5
    assert run.value("optimizer.nothing") is MISSING
    assert run.problems == []


@pytest.mark.parametrize(
    ("complete", "summary", "more", "begun", "status"),
    [
        (True, True, None, False, "finished"),
        (False, True, None, False, "stopped"),
        (False, False, None, False, "interrupted"),
        (True, True, {}, True, "interrupted"),  # resumed further, and killed
        (True, True, failure(), False, "finished"),  # a try changes nothing
        (False, True, failure(), False, "stopped"),
        (False, False, failure(), True, "failed"),
        (False, False, failure(code=2), False, "interrupted"),
        (False, False, failure(code=130), True, "interrupted"),
        (False, False, {"code": 75}, False, "interrupted"),
    ],
)
def test_the_status_is_that_of_the_newest_session_with_a_step(
    complete: bool,
    summary: bool,
    more: dict[str, Any] | None,
    begun: bool,
    status: str,
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "a", complete=complete, summary=summary)
    if more is not None:
        write_session(path, more or None, begun=begun)
    assert RunRecord(path).status == status


def test_a_locked_run_is_running(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False, metrics=3)
    with lock.held(path):
        run = RunRecord(path)
        assert run.status == "running"
        assert str(os.getpid()) in run.reason
        assert (run.step, run.seconds) == (30, 3.0)
    assert RunRecord(path).status == "interrupted"


def test_a_run_says_how_it_ended(tmp_path: Path) -> None:
    stopped = write_run(tmp_path / "0001", stopped="signal", complete=False)
    failed, interrupted, killed = (
        write_run(tmp_path / name, summary=False, metrics=3) for name in ("0002", "0003", "0004")
    )
    write_failure(failed)
    write_failure(interrupted, code=130)
    found = [RunRecord(path) for path in (stopped, failed, interrupted, killed)]
    assert [run.status for run in found] == ["stopped", "failed", "interrupted", "interrupted"]
    assert [run.step for run in found] == [20, 30, 30, 30]
    assert found[1].reason == "ValueError: no"
    assert found[3].reason.startswith("it was ended without saving: by Ctrl-C, a kill")
    write_session(failed)  # killed since
    assert (RunRecord(failed).status, RunRecord(failed).failure) == ("interrupted", {})


@pytest.mark.parametrize("name", ["config.yaml", "job.json", "environment.json", "ended.json"])
@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"{", b"[]", b"\xff\xfe: ["])
def test_a_damaged_file_is_said_and_never_an_error(
    name: str, content: bytes, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "a", metrics=2)
    (path / "sessions" / "0001" / name).write_bytes(content)
    run = RunRecord(path)
    assert run.status in record.STATUSES
    assert isinstance(run.name, str)
    assert run.tags == []
    assert run.recipe is not None
    assert (run.step, run.seconds, run.started, run.reason, run.objective) is not None
    if name != "config.yaml" and content != b"":
        assert name in " ".join(run.problems)


def test_a_directory_without_a_recipe_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    run = RunRecord(tmp_path / "a")
    assert run.status == "broken"
    assert run.reason == "config.yaml is missing or no recipe"
    assert run.value("optimizer.lr") is MISSING


def test_a_line_that_is_cut_off_is_not_the_last(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", summary=False, metrics=2)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "spl')
    assert RunRecord(path).step == 20


# -- runs below folders --------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(str(run.path.relative_to(folder)) for run in record.find_runs([folder]))


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    a = write_run(tmp_path / "digits" / "20260101-120000-aaaa")
    write_run(tmp_path / "b")
    (tmp_path / "digits" / "20260101-120001-bbbb" / "logs").mkdir(parents=True)  # just claimed
    (tmp_path / ".hidden").mkdir()
    write_run(tmp_path / ".hidden" / "c")
    expected = ["b", "digits/20260101-120000-aaaa", "digits/20260101-120001-bbbb"]
    assert names(tmp_path) == expected
    assert len(record.find_runs([tmp_path, a, tmp_path / "digits"])) == 3
    # What a run holds is no further run.
    write_run(a / "checkpoints" / "inner")
    assert names(tmp_path) == expected


def test_a_sweep_means_its_jobs(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    (sweep / "other").mkdir()
    (sweep / "0099").mkdir()  # claimed, and killed
    runs = record.find_runs([sweep])
    assert len(runs) == 13
    assert runs[0].sweep == sweep.name
    assert runs[-1].status == "broken"
    (one,) = record.find_runs([sweep / "0003"])
    assert one.sweep == sweep.name


def test_folders_without_runs_are_refused_where_runs_are_required(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert record.find_runs([tmp_path / "empty"]) == []
    with pytest.raises(ConfigError, match="no run lies there"):
        record.require_runs([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="there is no such folder"):
        record.find_runs([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="it is a file"):
        record.find_runs([tmp_path / "file"])
