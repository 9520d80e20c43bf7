"""Runs through torch_xla: the losses of the CPU, and the same bits after a kill (R1, R2, R5)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.helpers import python, ran, write_file
from tests.runner.loops import losses, records, weights

pytest.importorskip("torch_xla", reason="torch_xla is not installed: make test-xla")
pytestmark = pytest.mark.xla

LINE = (
    *("trainer.max_steps=24", "trainer.log_every=1", "trainer.eval_every=8"),
    *("checkpoint.every_steps=5", "model.width=8", "tracker.log_with=[]"),
)
ON_XLA = ("distributed=tpu", *LINE)
# Ends the process by SIGKILL once, after a step, where the working directory has a file `kill`.
KILL = """
import os, signal
from pathlib import Path
from runner.training.run import Callback

class Kill(Callback):
    def on_step(self, loop):
        if loop.state.step == 13 and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED = ("--import", "kill", "callbacks.kill._target_=kill.Kill", "resume=auto")


def run(folder: Path, *overrides: str, code: int = 0) -> Path:
    write_file(folder / "kill.py", KILL)
    answer = ran(python("-m", "runner", *overrides), folder, timeout=300)
    assert answer.returncode == code, answer.stdout + answer.stderr
    return max(folder.glob("runs/*/*"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize("sharded", [(), ("xla=sharded",)])
def test_losses_are_those_of_the_cpu(tmp_path: Path, sharded: tuple[str, ...]) -> None:
    more = ("model.dropout=0", "trainer.micro_batch_size=16", *sharded)
    xla = run(tmp_path / "xla", *ON_XLA, *more)
    cpu = run(tmp_path / "cpu", "distributed.device=cpu", *LINE, "model.dropout=0")
    assert losses(xla) == pytest.approx(losses(cpu), rel=1e-5)
    for split in ("validation", "test"):
        found, wanted = ([r["accuracy"] for r in records(one, split)] for one in (xla, cpu))
        assert found == pytest.approx(wanted, rel=1e-9)


def test_a_killed_run_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """Dropout included: the state of the device's generator is in the checkpoint."""
    straight = run(tmp_path / "straight", *ON_XLA, *KILLED)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "kill").touch()
    run(tmp_path / "cut", *ON_XLA, *KILLED, code=-signal.SIGKILL)
    resumed = run(tmp_path / "cut", *ON_XLA, *KILLED)
    assert (resumed / "sessions" / "0002").exists()
    assert losses(resumed) == losses(straight)
    saved = weights(resumed)
    assert all(torch.equal(value, saved[name]) for name, value in weights(straight).items())


def test_a_run_goes_on_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    run(tmp_path, *ON_XLA, *KILLED, "model.dropout=0", code=-signal.SIGKILL)
    more = ("distributed=none", "distributed.device=cpu")
    resumed = run(tmp_path, *LINE, *more, *KILLED, "model.dropout=0")
    whole = run(tmp_path / "whole", *LINE, *more, "model.dropout=0")
    assert (resumed / "sessions" / "0002").exists()
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
