"""Real training on two processes, ended from outside; and what user code may not do in silence."""

from __future__ import annotations

import json
import os
import posix
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from runner.launch import exit_guards
from tests.helpers import alive, python
from tests.signals.cells import COMMAND, ROOT, children, wait_until

RECIPE = (
    "trainer.epochs=10000",
    "trainer.log_every=1",
    "trainer.global_batch_size=128",
    "tracker.log_with=[]",
    "distributed=multi_cpu",
    "distributed.num_processes=2",
    "distributed.num_threads=1",
    "dataloader.num_workers=1",
    "dataloader.persistent_workers=true",
)


class Training:
    """A run under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            python("-c", COMMAND, *RECIPE),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def run_dir(self) -> Path:
        return next(self.folder.glob("runs/*/*"))

    def lines(self) -> int:
        files = list(self.folder.glob("runs/*/*/metrics.jsonl"))
        return files[0].read_text().count("\n") if files else 0

    def end(self, number: int) -> tuple[int, str, list[int]]:
        """Send a signal in the middle of training; return code, output and who is left."""
        begun = wait_until(lambda: self.lines() > 3 or self.process.poll() is not None, 300)
        assert begun
        # Two workers with a loader each.
        assert wait_until(lambda: len(children(self.process.pid)) >= 4, 300), self.process.poll()
        everyone = children(self.process.pid)
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=300)
        wait_until(lambda: not any(map(alive, everyone)), 60)
        return self.process.returncode, output, [pid for pid in everyone if alive(pid)]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    started = Training(tmp_path)
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.mark.slow  # `test_launcher.py` hands the signal on, `test_loop.py` saves at it
def test_sigterm_saves_and_leaves_nobody(training: Training) -> None:
    code, output, left = training.end(signal.SIGTERM)
    assert code == 75, output
    assert left == []
    summary = json.loads((training.run_dir / "summary.json").read_text())
    assert summary["stopped"] == "signal"
    newest = max(
        training.run_dir.glob("checkpoints/checkpoint_*/manifest.json"),
        key=lambda path: int(path.parent.name.split("_")[1]),
    )
    assert json.loads(newest.read_text())["metadata"]["step"] == summary["step"]
    assert f"runner resume={training.run_dir}" in output.replace("\n", "")


@pytest.mark.slow  # `test_launcher.py` does the same with workers that do not train
def test_control_c_leaves_nobody(training: Training) -> None:
    code, output, left = training.end(signal.SIGINT)
    assert code == 130, output
    assert left == []
    assert "Interrupted" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_sigkill_of_the_parent_leaves_nobody(training: Training) -> None:
    code, output, left = training.end(signal.SIGKILL)
    assert code == -signal.SIGKILL, output
    assert left == []


@pytest.mark.parametrize("module", [os, posix])
def test_an_exit_with_0_or_another_program_is_an_error(module: ModuleType) -> None:
    before = {name: getattr(module, name) for name in ("_exit", "execv", "execve")}
    with exit_guards.silent_exit_refused():
        with pytest.raises(exit_guards.EndedByOwnCodeError, match=r"os\._exit\(0\) was called"):
            module._exit(0)
        with pytest.raises(exit_guards.EndedByOwnCodeError, match=r"os\.execv\('/bin/true', …\)"):
            module.execv("/bin/true", ["true"])
    assert {name: getattr(module, name) for name in before} == before


def test_a_folder_of_the_users_may_have_the_name_of_a_system_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nt", ModuleType("nt"))
    with exit_guards.silent_exit_refused():
        assert os._exit is posix._exit
    assert os._exit.__module__ == "posix"
