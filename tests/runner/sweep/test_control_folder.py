"""The folder of a sweep's command, and what later commands remove."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.run_dir import lock
from runner.sweep import control_folder
from tests.helpers import SECONDS, python

KILLED = """
import os, pathlib, signal, sys
from runner.sweep import control_folder
with control_folder.made(pathlib.Path(sys.argv[1])) as control:
    (control / "0.pid").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_command_is_removed_by_the_next(tmp_path: Path) -> None:
    subprocess.run(python("-c", KILLED, str(tmp_path)), check=False, timeout=SECONDS)
    (left,) = tmp_path.glob(".command-*")
    assert control_folder.others(tmp_path) == []
    with control_folder.made(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]
        assert own != left
    assert list(tmp_path.iterdir()) == []


def test_that_of_a_living_command_stays(tmp_path: Path) -> None:
    with control_folder.made(tmp_path) as first, control_folder.made(tmp_path) as second:
        assert first.is_dir()
        assert control_folder.others(tmp_path, second) == [first]


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def none(path: Path) -> Iterator[None]:
        path.touch()
        raise OSError(errno.ENOLCK, "No locks available")
        yield

    monkeypatch.setattr(lock, "waited_for", none)
    with control_folder.made(tmp_path) as first, control_folder.made(tmp_path):
        assert first.is_dir()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="the jobs of a sweep are run from there"),
        control_folder.made(tmp_path / "missing"),
    ):
        pass
