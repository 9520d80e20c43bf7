"""R2, R4: the reduced matrix of kills: a few system calls, and none at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT, python
from tests.resume_matrix import warm
from tests.resume_matrix.held import Held


@pytest.mark.timeout(1200)
@pytest.mark.slow  # `test_transaction.py`, `test_start.py` and `test_taking_over.py` do it here
def test_however_a_run_ended_it_can_be_used(tmp_path: Path) -> None:
    command = python("-m", "tests.resume_matrix", "--every", "90", "--offset", "20", "--sizes", "1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=1100, cwd=ROOT, env=environment
    )
    print(answer.stdout)
    assert answer.returncode in (0, 2), answer.stdout + answer.stderr
    if answer.returncode == 2:
        skipped = [line for line in answer.stdout.splitlines() if line.startswith("skipped: ")]
        assert skipped, answer.stdout + answer.stderr
        pytest.skip(f"{'; '.join(skipped)}; all else holds")


def test_a_trace_names_the_calls_that_change_files(tmp_path: Path) -> None:
    trace = f"""
openat(AT_FDCWD</>, "{tmp_path}/a", O_RDONLY|O_CLOEXEC) = 3<{tmp_path}/a>
openat(AT_FDCWD</>, "{tmp_path}/b", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3<{tmp_path}/b>
write(3<{tmp_path}/b>, "x", 1) = 1
write(1</dev/null>, "x", 1) = 1
fsync(3<{tmp_path}/b>) = 0
close(3<{tmp_path}/b>) = 0
write(3<{tmp_path}/c>, "x", 1) = 1
"""
    found = [(call.name, call.number) for call in warm.changing_calls(trace, tmp_path)]
    assert found == [("openat", 2), ("write", 1), ("fsync", 1), ("write", 3)]


def test_a_trace_tells_what_was_committed_before_the_kill() -> None:
    folder = "/tmp/x/runs/tiny/1-ab/checkpoints"
    trace = f"""
rename("{folder}/.checkpoint_0.partial-1", "{folder}/checkpoint_0") = 0
rename("{folder}/.checkpoint_1.partial-1", "{folder}/checkpoint_1") = 0
rename("{folder}/.checkpoint_2.partial-1", "{folder}/checkpoint_2") = ?
+++ killed by SIGKILL +++
"""
    assert Held({}, more=1).plus(trace) == Held({"1-ab": 6})
    assert Held({"1-ab": 9}).plus(trace) == Held({"1-ab": 9})
