"""A run on a full disk ends with one line that says where there is no room, and stays usable.

Holds R2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT, on_small_disk, python, ran, small_disks_work


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "more", "what"),
    [
        ("24k", ["checkpoint=none", "trainer.log_every=1", "tracker=none"], "the run"),  # metrics
        ("300k", [], "the checkpoint"),
        ("1500k", [], "the checkpoint"),  # the third of them
        ("300k", ["distributed=multi_cpu", "tracker=none"], "the checkpoint"),
    ],
    ids=["metrics", "first", "third", "two-processes"],
)
def test_a_run_without_room_says_so(tmp_path: Path, size: str, more: list[str], what: str) -> None:
    if not small_disks_work(tmp_path):
        pytest.skip("no disk can be mounted here")
    line = python("-m", "runner", f"output_dir={tmp_path}", "trainer.epochs=4", *more)
    ended = ran(on_small_disk(tmp_path, size, *line), ROOT.parent, 400, OMP_NUM_THREADS="1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"writing {what}: the disk is full" in ended.stderr, ended.stderr
    assert f"are free in {tmp_path}" in ended.stderr
    assert "ProjectConfiguration" not in ended.stderr
    if what == "the checkpoint":
        assert "checkpoint.project.total_limit" in ended.stderr
    assert "Traceback" not in ended.stderr
