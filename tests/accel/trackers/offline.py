"""Trackers of libraries, each in processes of its own that reach no network.

The first process logs, saves a state and ends with an exception; the second loads that state, logs
more, ends the training and reads the library's files back.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from accel.trackers.table import TRACKERS
from tests.helpers import ROOT, python

CONFIG = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "name": "digits", "layers": None}
RESULT = "result.json"
Test = TypeVar("Test", bound=Callable[..., None])
SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """How a tracker is used by a test.

    Args:
        name: of the tracker.
        read: "module:function" that reads the library's files in the working directory back.
        arguments: in `init_kwargs`.
        environment: of the processes; ``{here}`` is the folder.
        is_killed: whether the first process is killed, in place of its exception.
    """

    name: str
    read: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    is_killed: bool = False


def needs(name: str) -> Callable[[Test], Test]:
    """Mark a test that uses a library: slow, and skipped where that is not installed."""
    entry = TRACKERS[name]
    missing = pytest.mark.skipif(not entry.is_available(), reason=f"no {entry.package} here")

    def mark(test: Test) -> Test:
        return pytest.mark.slow(missing(test))

    return mark


def logged(
    folder: Path,
    name: str,
    read: str,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    is_killed: bool = False,
) -> dict[str, Any]:
    """Return what the two processes report: ``ids``, their run ids, and ``found``, by `read`."""
    case = Case(name, read, arguments or {}, environment or {}, is_killed)
    _process(folder, "first", case, returncode=-signal.SIGKILL if is_killed else 1)
    first = json.loads((folder / RESULT).read_text())
    _process(folder, "second", case, returncode=0)
    second = json.loads((folder / RESULT).read_text())
    return {"ids": [first["id"], second["id"]], "found": second["found"]}


def _process(folder: Path, function: str, case: Case, returncode: int) -> None:
    script = "from tests.accel.trackers import offline; offline.main()"
    own = {key: value.format(here=folder) for key, value in case.environment.items()}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), **own}
    done = subprocess.run(
        python("-c", script, function, json.dumps(vars(case))),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    assert returncode != 1 or "ZeroDivisionError" in done.stderr
    assert "atexit" not in done.stderr, done.stderr  # the library had closed itself before


def main() -> None:
    """Run `first` or `second`, as the command line says, without a network."""
    _cut_off()
    function, case = sys.argv[1], Case(**json.loads(sys.argv[2]))
    {"first": first, "second": second}[function](case)


def _cut_off() -> None:
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def is_here(host: Any) -> bool:
        return host in (None, "localhost", "::1") or str(host).startswith("127.")

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not is_here(address[0]):
            raise OSError(f"no network in tests: {address}")
        connect(self, address)

    def look_up_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_here(host):
            raise OSError(f"no network in tests: {host}")
        return look_up(host, *args, **kwargs)

    socket.socket.connect = connect_here  # type: ignore[method-assign, assignment]
    socket.getaddrinfo = look_up_here


def first(case: Case) -> None:
    """Log two steps, images and a table; save; end with an exception."""
    import numpy as np
    import torch

    from accel import Accelerator

    accelerator = Accelerator(cpu=True, log_with=case.name, project_dir=".")
    accelerator.init_trackers("proj", CONFIG, {case.name: case.arguments})
    accelerator.log({"train/loss": torch.tensor(0.5), "note": "fine"}, step=1)
    accelerator.log({"train/loss": 0.25, "parts": {"a": 1}}, step=2)
    pixels = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    accelerator.log_images({"digits": pixels}, step=2)
    tracker = accelerator.get_tracker(case.name)
    assert accelerator.get_tracker(case.name, unwrap=True) is tracker.tracker
    if hasattr(type(tracker), "log_table"):
        tracker.log_table("table", columns=["x", "y"], data=[[1, 2], [3, 4]], step=2)
    accelerator.save_state("state")
    Path(RESULT).write_text(json.dumps({"id": tracker.run_id}))
    if case.is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    print(1 / 0)


def second(case: Case) -> None:
    """Continue the run of the state, and read the files back."""
    from accel import Accelerator
    from accel.machine.errors import StateError

    accelerator = Accelerator(cpu=True, log_with=case.name, project_dir=".")
    accelerator.load_state("state")
    again = {**CONFIG, "optimizer": {"lr": 0.2, "betas": [0.9, 0.99]}}
    accelerator.init_trackers("proj", again, {case.name: case.arguments})
    accelerator.log({"train/loss": 0.125}, step=3)
    tracker = accelerator.get_tracker(case.name)
    run_id = tracker.run_id
    accelerator.end_training()
    tracker.finish()  # nothing happens a second time
    assert accelerator.trackers == []
    with pytest.raises(StateError, match="finished"):
        tracker.log({"train/loss": 0.0}, step=4)
    module, _, function = case.read.partition(":")
    found = getattr(importlib.import_module(module), function)(run_id)
    Path(RESULT).write_text(json.dumps({"id": run_id, "found": found}))
