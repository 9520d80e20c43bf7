"""Files that a data factory is given: recorded by size and time, and compared."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from runner.run_dir import data_files


def recorded(node: object, cwd: Path) -> dict[str, Any]:
    return {"data": data_files.find(node, cwd=str(cwd))}


def test_data_that_a_factory_is_given_is_compared_by_size_and_time(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("abc")
    node = {"name": "corpus", "root": "corpus", "files": [str(folder / "a.txt")], "size": 3}
    before = recorded(node, tmp_path)
    assert list(before["data"]) == ["data.root", "data.files.0"]
    assert data_files.differences(before, before) == []
    (folder / "b.txt").write_text("d")
    more = recorded(node, tmp_path)
    assert data_files.differences(before, more) == [
        "data.root: 1 file of 3 bytes then, 2 files of 4 bytes now"
    ]
    assert data_files.identity(more) != data_files.identity(before) != ""
    (folder / "b.txt").unlink()
    os.utime(folder / "a.txt", (1, time.time() + 50))
    assert len(data_files.differences(before, recorded(node, tmp_path))) == 2
    assert "is not there" in data_files.differences(before, {"data": {}})[0]


def test_a_folder_elsewhere_differs_only_if_its_files_do(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.csv").write_text("1,2")
        os.utime(tmp_path / name / "a.csv", (5, 5))
    here, there = (recorded({"path": "a.csv"}, tmp_path / name) for name in ("here", "there"))
    assert data_files.differences(here, there) == []
    assert data_files.identity(here) == data_files.identity(there)
    (tmp_path / "there" / "a.csv").write_text("1,2,3")
    (line,) = data_files.differences(here, recorded({"path": "a.csv"}, tmp_path / "there"))
    assert line == (
        f"data.path: {tmp_path}/here/a.csv (1 file of 3 bytes) then, "
        f"{tmp_path}/there/a.csv (1 file of 5 bytes) now"
    )


def test_linked_folders_are_followed_and_files_that_change_places_are_seen(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.csv").write_text("1,2")
    (tmp_path / "real" / "up").symlink_to(tmp_path / "real")  # a loop
    (tmp_path / "real" / "self").symlink_to(tmp_path / "real" / "self")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "b.csv").write_text("3,4")
    for name in ("real/a.csv", "data/b.csv"):
        os.utime(tmp_path / name, (5, 5))
    before = recorded({"path": "data"}, tmp_path)
    assert before["data"]["data.path"]["files"] == 2
    os.utime(tmp_path / "real" / "a.csv", (6, 6))
    (line,) = data_files.differences(before, recorded({"path": "data"}, tmp_path))
    assert "files were written since" in line
    os.utime(tmp_path / "real" / "a.csv", (5, 5))
    assert data_files.differences(before, recorded({"path": "data"}, tmp_path)) == []
    (tmp_path / "data" / "b.csv").rename(tmp_path / "data" / "c.csv")
    (line,) = data_files.differences(before, recorded({"path": "data"}, tmp_path))
    assert line == "data.path: files have other names, sizes or times, of the same sum"


def test_a_folders_own_files_come_before_those_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "MOST_FILES", 3)
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / "images" / f"{number}.png").touch()
    (tmp_path / "labels.csv").write_text("1")
    before = recorded({"path": str(tmp_path)}, tmp_path)
    (tmp_path / "labels.csv").write_text("22")
    (line,) = data_files.differences(before, recorded({"path": str(tmp_path)}, tmp_path))
    assert line == "data.path: 3 files of 1 bytes or more then, 3 files of 2 bytes or more now"


def test_a_record_without_a_digest_is_compared_by_its_sums(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("1")
    now = recorded({"path": "d.csv"}, tmp_path)
    then = {"data": {"data.path": {k: v for k, v in now["data"]["data.path"].items()}}}
    del then["data"]["data.path"]["digest"]  # of an earlier version
    assert data_files.differences(then, now) == []
    then["data"]["data.path"]["bytes"] = 2
    assert len(data_files.differences(then, now)) == 1


def test_times_are_told_and_name_no_other_data(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("1")
    before = recorded({"path": "d.csv"}, tmp_path)
    os.utime(tmp_path / "d.csv", (5, 5))  # a copy for another job
    after = recorded({"path": "d.csv"}, tmp_path)
    assert len(data_files.differences(before, after)) == 1
    assert data_files.identity(before) == data_files.identity(after)
    older = {"data": {key: {**one, "newest": 7.0} for key, one in after["data"].items()}}
    del older["data"]["data.path"]["digest"]  # of an earlier version
    assert data_files.identity(older) == data_files.identity(after)
    (tmp_path / "d.csv").write_text("12")
    more = recorded({"path": "d.csv"}, tmp_path)
    assert data_files.identity(more) != data_files.identity(after)


def test_a_folder_that_the_run_has_made_is_no_difference(tmp_path: Path) -> None:
    before = recorded({"cache": "cache"}, tmp_path)
    (tmp_path / "cache").mkdir()
    assert data_files.differences(before, recorded({"cache": "cache"}, tmp_path)) == []
    assert data_files.identity(before) == ""
