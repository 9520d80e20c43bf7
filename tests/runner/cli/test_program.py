"""The command as a program: standard streams that are closed, and how its process was started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers import python

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ("-m", "runner", "debug=fdr", "distributed=multi_cpu", "distributed.num_processes=2")


def start(line: tuple[str, ...], folder: Path, shell: str = "") -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", *python(*line)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("shell", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device(shell: str, tmp_path: Path) -> None:
    done = start(("-m", "runner", "--version"), tmp_path, shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("runner ") == (">&-" not in shell.split())


@pytest.mark.slow  # processes of its own import PyTorch
@pytest.mark.parametrize("shell", [">&-", "<&- >&- 2>&-"])
def test_a_run_of_two_processes_needs_no_streams(shell: str, tmp_path: Path) -> None:
    done = start((*TRAIN, f"run_dir={tmp_path / 'run'}"), tmp_path, shell)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow  # likewise
def test_a_run_ends_well_where_ends_of_children_are_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the command inherits it
    try:
        process = subprocess.Popen(
            python(*TRAIN),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGCHLD, before)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed


PACKAGE = """
import multiprocessing, os, time
if os.environ.get("RANK") is None:  # the command, whose pipes this process holds
    context = multiprocessing.get_context("fork")
    context.Process(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.mark.slow  # likewise
@pytest.mark.parametrize(("more", "code"), [((), 0), (("optimizer.lrr=1",), 2)])
def test_a_package_that_forks_delays_nothing(
    more: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    (tmp_path / "forking").mkdir()
    (tmp_path / "forking" / "__init__.py").write_text(PACKAGE)
    line = (*TRAIN[:2], "--import", "forking", *TRAIN[2:], *more)
    process = subprocess.Popen(
        python(*line),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.wait(300) == code
