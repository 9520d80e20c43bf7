"""torchrun with the script's exit code."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.launch import agent
from tests.helpers import ROOT, python

FLAGS = ["--standalone", "--nproc-per-node=1", "--no-python", "sh"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("exit 7", 7),
        pytest.param("exit 0", 0, marks=pytest.mark.slow),
        pytest.param("kill -KILL $$", 128 + signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_is_that_of_the_process(tmp_path: Path, text: str, code: int) -> None:
    place = tmp_path / "x.sh"
    place.write_text(text)
    done = subprocess.run(
        python("-m", "runner.launch.agent", *FLAGS, str(place)),
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
    )
    assert done.returncode == code, done.stderr


def test_a_signal_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException

    def interrupted(arguments: Any) -> None:
        raise SignalException("", signal.SIGINT)

    monkeypatch.setattr(run, "run", interrupted)
    assert agent.main([*FLAGS, "x.sh"]) == 130
