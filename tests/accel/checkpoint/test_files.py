"""Checkpoint directories: what counts as complete, what a cut leaves, what rotation spares."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
from pathlib import Path

import pytest

from accel.checkpoint import files
from accel.errors import CheckpointError
from tests.helpers import python


def commit(path: Path, content: dict[str, str] | None = None, **metadata: int) -> Path:
    files.tidy(path)
    staged = files.stage(path)
    fill(staged, content or {"a.bin": "alpha", "unet/b.bin": "beta"})
    files.seal(staged, {"world_size": 1}, metadata)
    files.publish(staged, path)
    return path


def fill(folder: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_committed_directory_is_complete_and_tells_what_it_is(tmp_path: Path) -> None:
    path = commit(tmp_path / "checkpoint_0", step=7)
    manifest = files.verify(path)
    assert manifest.metadata == {"step": 7}
    assert manifest.engine["world_size"] == 1
    assert manifest.files["unet/b.bin"].size == 4
    assert names(tmp_path) == ["checkpoint_0"]
    assert json.loads((path / "manifest.json").read_text())["format"] == files.FORMAT_VERSION


def test_metadata_comes_back_as_json_knows_it(tmp_path: Path) -> None:
    staged = files.stage(tmp_path / "state")
    files.seal(staged, {}, {"by_rank": {2: 1, 10: 2}, "shape": (3, 4), "rate": 0.1})
    files.publish(staged, tmp_path / "state")
    metadata = files.verify(tmp_path / "state").metadata
    assert metadata == {"by_rank": {"2": 1, "10": 2}, "shape": [3, 4], "rate": 0.1}


def test_metadata_that_is_no_json_is_refused(tmp_path: Path) -> None:
    staged = files.stage(tmp_path / "state")
    with pytest.raises(CheckpointError, match="metadata"):
        files.seal(staged, {}, {"model": object()})


@pytest.mark.parametrize("name", ["a.bin", "unet/b.bin"])
def test_each_kind_of_damage_is_named(tmp_path: Path, name: str) -> None:
    path = commit(tmp_path / "checkpoint_0")
    flip_a_bit(path / name)
    with pytest.raises(CheckpointError, match=f"{name} was altered"):
        files.verify(path)
    os.truncate(path / name, 2)
    with pytest.raises(CheckpointError, match=f"{name} has 2 bytes"):
        files.verify(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        files.verify(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        files.verify(path)


def test_a_manifest_is_not_trusted_either(tmp_path: Path) -> None:
    path = commit(tmp_path / "checkpoint_0", step=1)
    manifest = path / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"step": 1', '"step": 9'))
    with pytest.raises(CheckpointError, match="was altered"):
        files.read_manifest(path)
    manifest.write_text(whole[:-20])
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.read_manifest(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", ""])
def test_a_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    path = commit(tmp_path / "checkpoint_0")
    forged = files.Manifest({name: files.Entry(1, "0")}, {}, {})
    (path / "manifest.json").write_text(forged.to_json())
    with pytest.raises(CheckpointError, match="altered"):
        files.read_manifest(path)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FORMAT_VERSION", 2)
    path = commit(tmp_path / "checkpoint_0")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format is 2"):
        files.read_manifest(path)


def test_the_newest_complete_one_wins_and_broken_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert files.newest_complete(tmp_path / "nowhere") is None
    for number in (0, 2, 9, 10, 11):
        commit(tmp_path / f"checkpoint_{number}", step=number)
    (tmp_path / "checkpoint_x").mkdir()
    flip_a_bit(tmp_path / "checkpoint_11" / "a.bin")
    (tmp_path / "checkpoint_10" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert files.newest_complete(tmp_path) == tmp_path / "checkpoint_9"
    assert "checkpoint_11" in caplog.text
    assert "a.bin was altered" in caplog.text
    assert "checkpoint_10" in caplog.text


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    fill(files.stage(tmp_path / "checkpoint_0"), {"a.bin": "half"})
    assert files.newest_complete(tmp_path) is None
    commit(tmp_path / "checkpoint_0")
    assert names(tmp_path) == ["checkpoint_0"]


# -- directories that exist already --------------------------------------------------------


def test_an_existing_directory_keeps_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "out"
    fill(tmp_path, {"out/log.txt": "mine"})
    commit(path, {"a.bin": "1", "random_states_1.pkl": "r"})
    commit(path, {"a.bin": "2", "c.bin": "3"})
    files.verify(path)
    assert names(path) == ["a.bin", "c.bin", "log.txt", "manifest.json"]
    assert (path / "a.bin").read_text() == "2"


def test_a_name_taken_by_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(CheckpointError, match="a file has that name"):
        files.stage(tmp_path / "state")


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_cut_while_an_existing_directory_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    path = commit(tmp_path / "state", {"a.bin": "old", "b.bin": "old"}, step=1)
    staged = files.stage(path)
    fill(staged, {"a.bin": "new", "b.bin": "new"})
    files.seal(staged, {}, {"step": 2})
    replace, done = os.replace, []

    def replace_some(source: Path, target: Path) -> None:
        if len(done) == moves:
            raise OSError(errno.EIO, "cut")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_some)
    with pytest.raises(OSError, match="cut"):
        files.publish(staged, path)
    monkeypatch.undo()
    assert not files.is_complete(path)
    assert files.repair(path)
    assert files.verify(path).metadata == {"step": 2}
    assert names(path) == ["a.bin", "b.bin", "manifest.json"]
    assert not files.repair(path)


def test_the_next_save_finishes_a_take_over_before_it_starts(tmp_path: Path) -> None:
    path = commit(tmp_path / "state", {"a.bin": "old"}, step=1)
    staged = files.stage(path)
    fill(staged, {"a.bin": "new"})
    files.seal(staged, {}, {"step": 2})
    (path / "manifest.json").unlink()
    files.tidy(path)
    assert files.verify(path).metadata == {"step": 2}


# -- rotation ------------------------------------------------------------------------------


def test_rotation_deletes_the_oldest_and_spares_the_protected(tmp_path: Path) -> None:
    paths = [commit(tmp_path / f"checkpoint_{number}") for number in range(5)]
    assert files.prune(tmp_path, keep=2, protected=[paths[1]]) == [paths[0], paths[2]]
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3", "checkpoint_4"]


def test_rotation_keeps_the_last_whole_one(tmp_path: Path) -> None:
    paths = [commit(tmp_path / f"checkpoint_{number}") for number in range(4)]
    for path in paths[2:]:
        flip_a_bit(path / "a.bin")
    assert files.prune(tmp_path, keep=2) == [paths[0]]
    assert files.newest_complete(tmp_path) == paths[1]


def test_rotation_clears_what_was_interrupted(tmp_path: Path) -> None:
    files.stage(tmp_path / "checkpoint_0")
    commit(tmp_path / "checkpoint_1")
    assert files.prune(tmp_path, keep=1) == []
    assert names(tmp_path) == ["checkpoint_1"]


# -- small parts ---------------------------------------------------------------------------


def test_names() -> None:
    assert files.numbered("optimizer", ".bin", 0) == "optimizer.bin"
    assert files.numbered("optimizer", ".bin", 2) == "optimizer_2.bin"
    assert files.model_name(1) == "model_1.safetensors"
    assert files.model_name(0, safe=False) == "pytorch_model.bin"
    assert files.iteration_of("/x/checkpoint_12") == 12
    assert files.iteration_of("/x/checkpoint_12b") is None


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "best.json"
    files.write_atomically(target, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "flush_file", fail)
    with pytest.raises(OSError, match="full"):
        files.write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["best.json"]


def test_directories_are_read_without_torch() -> None:
    probe = "import sys, accel.checkpoint.files; print('torch' in sys.modules)"
    answer = subprocess.run(
        python("-c", probe), capture_output=True, text=True, timeout=300, check=True
    )
    assert answer.stdout.strip() == "False"
