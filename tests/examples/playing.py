"""Plays a script of `examples/scripts/` on warm workers, for accel or for the documented package.

The script's text is unchanged: the other package stands in accel's place while it runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import run_distributed

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
MODULES = ("", ".utils", ".local_sgd")  # that scripts import from
Metrics = dict[str, Any]


def metrics_of(
    script: str, processes: int, arguments: tuple[str, ...], folder: Path, package: str = "accel"
) -> Metrics:
    """Return what a script printed in its last line.

    Args:
        script: its name without ``.py``.
        processes: that run it, on the CPU.
        arguments: of its command line.
        folder: where it works; made if it is not there.
        package: what it finds under the name `accel`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outputs = run_distributed(play, processes, script, arguments, str(folder), package)
    assert outputs[1:] == [""] * (processes - 1)  # the main process alone prints
    return last_line(outputs[0])


def last_line(output: str) -> Metrics:
    """Return the metrics that a script printed at its end."""
    return json.loads(output.splitlines()[-1])


def play(script: str, arguments: tuple[str, ...], folder: str, package: str) -> str:
    """Run a script on this process; return what it printed."""
    path = str(SCRIPTS / f"{script}.py")
    output = io.StringIO()
    with (
        in_place_of_accel(package),
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", [path, "--cpu", *arguments]),
        contextlib.redirect_stdout(output),
    ):
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()


@contextlib.contextmanager
def in_place_of_accel(package: str) -> Iterator[None]:
    """Let ``import accel`` find another package, which is left without state at the end."""
    if package == "accel":
        yield
        return
    modules = {f"accel{name}": importlib.import_module(f"{package}{name}") for name in MODULES}
    try:
        with mock.patch.dict(sys.modules, modules):
            yield
    finally:
        _reset(package)


def _reset(package: str) -> None:
    import torch.distributed as dist

    state = importlib.import_module(f"{package}.state")
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
