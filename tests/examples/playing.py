"""Plays a script of `examples/scripts/` on warm workers, which saves the seconds of imports."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import ROOT, run_distributed

SCRIPTS = ROOT / "examples" / "scripts"
Metrics = dict[str, Any]


def metrics_of(script: str, processes: int, arguments: tuple[str, ...], folder: Path) -> Metrics:
    """Return what a script printed in its last line.

    Args:
        script: its name without ``.py``.
        processes: that run it, on the CPU.
        arguments: of its command line.
        folder: where it works; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outputs = run_distributed(play, processes, script, arguments, str(folder))
    assert outputs[1:] == [""] * (processes - 1)  # the main process alone prints
    return last_line(outputs[0])


def last_line(output: str) -> Metrics:
    """Return the metrics that a script printed at its end."""
    return json.loads(output.splitlines()[-1])


def play(script: str, arguments: tuple[str, ...], folder: str) -> str:
    """Run a script on this process; return what it printed."""
    path = str(SCRIPTS / f"{script}.py")
    output = io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", [path, "--cpu", *arguments]),
        contextlib.redirect_stdout(output),
    ):
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()
