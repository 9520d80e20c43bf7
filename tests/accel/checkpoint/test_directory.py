"""R4: a checkpoint is whole or does not count, whenever its writer is killed."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel.checkpoint import directory, disk_full, sharded
from accel.machine.errors import CheckpointError, DiskFullError
from tests import commands
from tests.accel.checkpoint.test_sharded import assert_equal, resumed, started, trained
from tests.accel.strategies.training import steps_of
from tests.helpers import WorkerError, on_small_disk, python, run_distributed, small_disks_work


def commit(path: Path, content: dict[str, str] | None = None, **metadata: int) -> Path:
    directory.tidy(path)
    staged = directory.stage(path)
    fill(staged, content or {"a.bin": "alpha", "unet/b.bin": "beta"})
    directory.seal(staged, {"world_size": 1}, metadata)
    directory.publish(staged, path)
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
    manifest = directory.verify(path)
    assert manifest.metadata == {"step": 7}
    assert manifest.engine["world_size"] == 1
    assert manifest.files["unet/b.bin"].size == 4
    assert names(tmp_path) == ["checkpoint_0"]
    assert json.loads((path / "manifest.json").read_text())["format"] == directory.FORMAT_VERSION


def test_metadata_that_is_no_json_is_refused(tmp_path: Path) -> None:
    staged = directory.stage(tmp_path / "state")
    with pytest.raises(CheckpointError, match="metadata"):
        directory.seal(staged, {}, {"model": object()})


@pytest.mark.parametrize("name", ["a.bin", "unet/b.bin"])
def test_each_kind_of_damage_is_named(tmp_path: Path, name: str) -> None:
    path = commit(tmp_path / "checkpoint_0")
    flip_a_bit(path / name)
    with pytest.raises(CheckpointError, match=f"{name} was altered"):
        directory.verify(path)
    os.truncate(path / name, 2)
    with pytest.raises(CheckpointError, match=f"{name} has 2 bytes"):
        directory.verify(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        directory.verify(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        directory.verify(path)


def test_a_manifest_is_not_trusted_either(tmp_path: Path) -> None:
    path = commit(tmp_path / "checkpoint_0", step=1)
    manifest = path / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"step": 1', '"step": 9'))
    with pytest.raises(CheckpointError, match="was altered"):
        directory.read_manifest(path)
    manifest.write_text(whole[:-20])
    with pytest.raises(CheckpointError, match="cannot be read"):
        directory.read_manifest(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", ""])
def test_a_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    path = commit(tmp_path / "checkpoint_0")
    forged = directory.Manifest({name: directory.Entry(1, "0")}, {}, {})
    (path / "manifest.json").write_text(forged.to_json())
    with pytest.raises(CheckpointError, match="altered"):
        directory.read_manifest(path)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "FORMAT_VERSION", 2)
    path = commit(tmp_path / "checkpoint_0")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format is 2"):
        directory.read_manifest(path)


def test_the_newest_complete_one_wins_and_broken_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert directory.newest_complete(tmp_path / "nowhere") is None
    for number in (0, 2, 9, 10, 11):
        commit(tmp_path / f"checkpoint_{number}", step=number)
    (tmp_path / "checkpoint_x").mkdir()
    flip_a_bit(tmp_path / "checkpoint_11" / "a.bin")
    (tmp_path / "checkpoint_10" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert directory.newest_complete(tmp_path) == tmp_path / "checkpoint_9"
    assert "checkpoint_11" in caplog.text
    assert "a.bin was altered" in caplog.text
    assert "checkpoint_10" in caplog.text


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    fill(directory.stage(tmp_path / "checkpoint_0"), {"a.bin": "half"})
    assert directory.newest_complete(tmp_path) is None
    commit(tmp_path / "checkpoint_0")
    assert names(tmp_path) == ["checkpoint_0"]


# -- directories that exist already --------------------------------------------------------


def test_an_existing_directory_keeps_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "out"
    fill(tmp_path, {"out/log.txt": "mine"})
    commit(path, {"a.bin": "1", "random_states_1.pkl": "r"})
    commit(path, {"a.bin": "2", "c.bin": "3"})
    directory.verify(path)
    assert names(path) == ["a.bin", "c.bin", "log.txt", "manifest.json"]
    assert (path / "a.bin").read_text() == "2"


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_cut_while_an_existing_directory_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    path = commit(tmp_path / "state", {"a.bin": "old", "b.bin": "old"}, step=1)
    staged = directory.stage(path)
    fill(staged, {"a.bin": "new", "b.bin": "new"})
    directory.seal(staged, {}, {"step": 2})
    replace, done = os.replace, []

    def replace_some(source: Path, target: Path) -> None:
        if len(done) == moves:
            raise OSError(errno.EIO, "cut")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_some)
    with pytest.raises(OSError, match="cut"):
        directory.publish(staged, path)
    monkeypatch.undo()
    assert not directory.is_complete(path)
    assert directory.repair(path)
    assert directory.verify(path).metadata == {"step": 2}
    assert names(path) == ["a.bin", "b.bin", "manifest.json"]
    assert not directory.repair(path)


# -- rotation ------------------------------------------------------------------------------


def test_rotation_deletes_the_oldest_and_spares_the_protected(tmp_path: Path) -> None:
    paths = [commit(tmp_path / f"checkpoint_{number}") for number in range(5)]
    assert directory.prune(tmp_path, keep=2, protected=[paths[1]]) == [paths[0], paths[2]]
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3", "checkpoint_4"]


def test_rotation_keeps_the_last_whole_one(tmp_path: Path) -> None:
    paths = [commit(tmp_path / f"checkpoint_{number}") for number in range(4)]
    for path in paths[2:]:
        flip_a_bit(path / "a.bin")
    assert directory.prune(tmp_path, keep=2) == [paths[0]]
    assert directory.newest_complete(tmp_path) == paths[1]


# -- small parts ---------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "best.json"
    directory.write_atomically(target, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(directory, "flush_file", fail)
    with pytest.raises(OSError, match="full"):
        directory.write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["best.json"]


ROOT = Path(__file__).resolve().parents[3]
# Fills the disk up to some bytes, and saves: each size stops another writer in another place.
SAVES = """
import os, sys
from pathlib import Path
import torch
from accel import Accelerator
from accel.checkpoint import directory
from accel.machine.errors import DiskFullError

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True, project_dir=str(folder))
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 1000))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 100)).sum())
optimizer.step()
first = accelerator.save_state(folder / "first")
filler = folder / "filler"
for left in (1500, 700, 420, 200, 64, 8, 0):
    filler.write_bytes(b"")
    disk = os.statvfs(folder)
    filler.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - left * 1024)))
    try:
        accelerator.save_state(folder / "second")
    except DiskFullError as error:
        print("full", left, error)
    else:
        print("saved", left)
    directory.verify(first)
    assert not (folder / "second").exists() or directory.is_complete(folder / "second")
    filler.write_bytes(b"")
accelerator.save_state(folder / "second")
"""


@pytest.mark.slow  # it fills a file system
def test_a_checkpoint_that_finds_no_room_says_so(tmp_path: Path) -> None:
    if not small_disks_work(tmp_path):
        pytest.skip("no disk can be mounted here")
    ended = subprocess.run(
        on_small_disk(tmp_path, "4m", *python("-c", SAVES, str(tmp_path))),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "saved 1500"
    assert len(lines) == 7
    for line in lines[1:]:
        assert line.startswith("full"), line
        assert "the disk is full: " in line
        assert f"are free in {tmp_path}" in line
        assert "total_limit" in line


def _fill(folder: str) -> None:
    with disk_full.told("the log", Path(folder)):
        try:
            with open("/dev/full", "w") as file:
                file.write("x")
        except OSError as error:
            raise RuntimeError("something went wrong") from error


def test_what_says_that_a_disk_is_full() -> None:
    with pytest.raises(DiskFullError, match=r"writing the log: the disk is full: .* are free in /"):
        _fill("/nowhere/at/all")
    assert disk_full.is_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert disk_full.is_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not disk_full.is_full(OSError(errno.EACCES, "Permission denied"))
    for other in (ValueError("unexpected pos 64 vs 0"), PermissionError("no")):
        with pytest.raises(type(other)), disk_full.told("it", Path("/")):
            raise other  # there is room: it is something else


ROOT_of_kill = Path(__file__).resolve().parents[3]


def killed_everywhere(tmp_path: Path, into: str) -> list[dict[str, Any]]:
    command = ("-m", "tests.accel.checkpoint.killed_saver", str(tmp_path / "run"), into)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = commands.run(*command, cwd=ROOT_of_kill, environment=environment)
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
@pytest.mark.parametrize("into", ["new", "existing"])
def test_a_kill_at_any_step_leaves_a_complete_state(tmp_path: Path, into: str) -> None:
    found = killed_everywhere(tmp_path, into)
    assert len(found) > 20
    assert [entry["killed"] for entry in found] == [True] * (len(found) - 1) + [False]
    states = [entry["state"] for entry in found]
    assert set(states) == {"old", "new"}
    # Old until the commit, new from then on: never nothing, never back again.
    assert states == sorted(states, reverse=True)
    assert any(entry["repaired"] for entry in found) == (into == "existing")


# -- several processes ---------------------------------------------------------------------


def killed_in_shards(old: str, new: str, rank: int, step: str) -> None:
    """Save, train on, and save again: there `rank` dies while shards are written."""
    accelerator, model, optimizer, loader = started()
    steps_of(accelerator, model, optimizer, loader)
    accelerator.save_state(old)
    steps_of(accelerator, model, optimizer, loader)
    if accelerator.process_index == rank:
        setattr(
            sharded.FileSystemWriter, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        )
    accelerator.save_state(new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "step", "into"),
    [(1, "write_data", "new"), (0, "write_data", "old"), (0, "finish", "old")],
)
def test_a_kill_while_shards_are_written_leaves_the_older_state_to_resume_from(
    tmp_path: Path, rank: int, step: str, into: str
) -> None:
    (saved, after), _ = run_distributed(trained, 2, str(tmp_path / "unbroken"), {})
    old, new = str(tmp_path / "run" / "old"), str(tmp_path / "run" / into)
    with pytest.raises(WorkerError, match=rf"rank {rank} died"):
        run_distributed(killed_in_shards, 2, old, new, rank, step)
    directory.verify(old)
    assert not (tmp_path / "run" / "new").exists()
    (found, losses), _ = run_distributed(resumed, 2, old, {})
    assert_equal(found, saved)
    assert losses == after
    # The next save of that name removes what the killed one left.
    (saved, _), _ = run_distributed(trained, 2, new, {})
    assert not any(tmp_path.rglob("*.partial-*"))
    assert_equal(run_distributed(resumed, 2, new, {})[0][0], saved)
