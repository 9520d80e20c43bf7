"""A full disk is told as such, on a disk that is really full."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from accel.checkpoint import disk_full
from accel.machine.errors import DiskFullError
from tests.helpers import on_small_disk, python, small_disks_work

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
        assert re.search(
            f"are free in {tmp_path}(/second)?; the checkpoint takes about 1.3 MB", line
        ), line
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
