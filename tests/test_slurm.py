"""R3: the cluster of the tests leaves nothing behind, whatever ends the test."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.helpers import ROOT, python
from tests.slurm import processes_of, running, wait_until

pytestmark = pytest.mark.slurm
STARTED = """
import sys, time
from pathlib import Path
from tests.slurm import running
with running(Path(sys.argv[1])) as cluster:
    cluster.ask("sbatch", "--output=/dev/null", "--nodes=2", "--wrap=srun sleep 1000")
    while not any("R" == one for one in cluster.ask("squeue", "-h", "--format=%t").split()):
        time.sleep(0.1)
    print("ready", flush=True)
    time.sleep(1000)
"""


def fail_in_a_cluster(folder: Path) -> None:
    with running(folder) as cluster:
        submit = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=srun sleep 1000")
        cluster.wait_for(cluster.ask(*submit), "RUNNING")
        assert len(processes_of(folder / "slurm.conf")) > 4
        raise ZeroDivisionError


@pytest.mark.slow
def test_nothing_is_left_after_a_failure() -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        with pytest.raises(ZeroDivisionError):
            fail_in_a_cluster(Path(folder))
        assert processes_of(Path(folder) / "slurm.conf") == []


@pytest.mark.slow
def test_nothing_is_left_after_a_kill() -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        configuration = Path(folder) / "slurm.conf"
        command = python("-c", STARTED, folder)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as test:
            assert test.stdout is not None
            assert test.stdout.readline() == "ready\n"
            assert processes_of(configuration)
            test.kill()
        wait_until(lambda: processes_of(configuration) == [], "processes are left")
