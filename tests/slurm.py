"""A Slurm cluster of one node on this machine, for tests of srun.

Source: https://slurm.schedmd.com/slurm.conf.html; https://github.com/dun/munge/wiki/Man-8-munged
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
START_SECONDS = 90.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def missing() -> str:
    """Return why no cluster can be started here, or ""."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "a cluster of Slurm is started by root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster of one node; yield the variables with which srun finds it.

    Args:
        folder: an empty one, of a short path (sockets are in it).
    """
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    ports = {"controller": free_port(), "daemon": free_port()}
    text = CONFIGURATION.format(host=host, folder=folder, cpus=os.cpu_count(), **ports)
    configuration.write_text(text)
    places = {"key": key, "socket": folder / "munge.socket", "pid": folder / "munged.pid"}
    places |= {"log": folder / "munged.log", "seed": folder / "munged.seed"}
    munged = ["munged", "--foreground", "--force", f"--socket={places['socket']}"]
    munged += [f"--{name}-file={places[name]}" for name in ("key", "pid", "log", "seed")]
    variables = {**os.environ, "SLURM_CONF": str(configuration)}
    with contextlib.ExitStack() as stack:
        for command in (
            munged,
            ["slurmctld", "-D", "-f", str(configuration)],
            ["slurmd", "-D", "-N", host, "-f", str(configuration)],
        ):
            stack.enter_context(_running(command, folder / f"{command[0]}.out", variables))
            _wait_for_socket(places["socket"])
        _wait_until_idle(variables, folder)
        yield {"SLURM_CONF": str(configuration)}


@contextlib.contextmanager
def _running(command: list[str], output: Path, variables: dict[str, str]) -> Iterator[None]:
    with output.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=variables)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_socket(path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"munged made no {path}")
        time.sleep(0.1)


def _wait_until_idle(variables: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        command = ["sinfo", "--noheader", "--format=%T"]
        answer = subprocess.run(command, capture_output=True, text=True, env=variables)
        if answer.stdout.strip() == "idle":
            return
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise TimeoutError(f"no idle node: {answer.stdout} {answer.stderr}\n{logs}")
        time.sleep(0.3)
