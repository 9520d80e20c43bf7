"""Heartbeats of a worker, as its parent hears them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from runner.launch.heartbeats import Heartbeat


@pytest.fixture
def heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Heartbeat("launch_1", 3)


def test_a_parent_hears_each_heartbeat(heartbeat: Heartbeat) -> None:
    heartbeat.make()
    assert heartbeat.last() is None  # not watched yet
    worker = Heartbeat("launch_1", 3)
    worker.beat()
    first = heartbeat.last()
    assert first is not None
    while heartbeat.last() == first:  # a clock may be coarse
        worker.beat()
    worker.rest()
    assert heartbeat.last() is None


def test_a_file_is_made_and_removed_by_the_parent_alone(
    heartbeat: Heartbeat, tmp_path: Path
) -> None:
    heartbeat.beat()  # of a worker without a parent
    assert list(tmp_path.iterdir()) == []
    heartbeat.make()
    heartbeat.rest()
    assert len(list(tmp_path.iterdir())) == 1
    heartbeat.remove()
    heartbeat.remove()
    assert list(tmp_path.iterdir()) == []
    assert heartbeat.last() is None


def test_without_a_folder_for_it_nobody_is_heard(
    heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    other = Heartbeat("launch_1", 0)
    other.make()
    other.beat()
    assert other.last() is None
