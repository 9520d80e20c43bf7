"""Where the files of a project are, and the module search path (C4)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.recipe import paths

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_working_directory_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/usr/lib/x"])
    paths.move_project_last()
    assert sys.path == ["/usr/lib/x", str(tmp_path)]
