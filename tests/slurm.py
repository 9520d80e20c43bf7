"""A Slurm cluster of one or more nodes on this machine, for tests.

Source: https://slurm.schedmd.com/slurm.conf.html; https://github.com/dun/munge/wiki/Man-8-munged;
    https://slurm.schedmd.com/programmer_guide.html#multiple_slurmd_support
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT, alive, free_port, python

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "sbatch", "scontrol", "scancel")
START_SECONDS = 90.0
SECONDS = 300.0
KILL_WAIT = 20
# Clusters of tests that run at the same time have names of their own, as clusters of a site have:
# processes take their rendezvous from the name of their job.
# Jobs in `all`, the default partition, share cores; those in `high` take the nodes of `low` away.
CONFIGURATION = """
ClusterName=test{controller}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Return why no cluster can be started here, or ""."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "a cluster of Slurm is started by root"


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs: `variables` let Slurm's commands find it."""

    variables: dict[str, str]
    nodes: list[str]

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints."""
        environment = {**os.environ, **self.variables}
        answer = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=SECONDS
        )
        assert answer.returncode == 0, (command, answer.stdout, answer.stderr)
        return answer.stdout.strip()

    def state(self, job_id: str) -> str:
        """Return the state of a job, e.g. RUNNING."""
        shown = self.ask("scontrol", "--oneliner", "show", "job", job_id)
        return shown.partition("JobState=")[2].split()[0]

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that are queued or run, elements of arrays among them."""
        return self.ask("squeue", "--noheader", "--array", "--format=%i").split()

    def wait_for(self, job_id: str, *states: str, seconds: float = SECONDS) -> str:
        """Return the state of a job once it is one of `states`."""
        wait_until(lambda: self.state(job_id) in states, f"{job_id}: {states}", seconds)
        return self.state(job_id)


def wait_until(reached: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """Wait until `reached` returns something true; an AssertionError names `what` was not."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@contextlib.contextmanager
def cluster(folder: Path, num_nodes: int = 1) -> Iterator[dict[str, str]]:
    """Run a cluster; yield the variables with which srun finds it.

    Args:
        folder: an empty one, of a short path (sockets are in it).
        num_nodes: each has as many CPUs as this machine.
    """
    with running(folder, num_nodes) as found:
        yield found.variables


@contextlib.contextmanager
def running(folder: Path, num_nodes: int = 2) -> Iterator[Cluster]:
    """Run a cluster; at the end its jobs and daemons are ended, whatever has failed."""
    host = socket.gethostname().partition(".")[0]
    # The first name can be resolved, as the rendezvous of a job needs.
    nodes = [host, *(f"{host}-{number}" for number in range(2, num_nodes + 1))]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for node in nodes:
        (folder / "spool" / node).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=host,
            folder=folder,
            controller=free_port(),
            kill_wait=KILL_WAIT,
            nodes="\n".join(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
                f"CPUs={os.cpu_count()} State=UNKNOWN"
                for node in nodes
            ),
        )
    )
    found = Cluster({"SLURM_CONF": str(configuration)}, nodes)
    variables = {**os.environ, **found.variables}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_guarded(configuration))
        stack.enter_context(_running(_munged(folder), folder / "munged.out", variables))
        wait_until((folder / "munge.socket").exists, "munged made no socket", START_SECONDS)
        given = ["-D", "-f", str(configuration)]
        control = ["slurmctld", *given]
        stack.enter_context(_running(control, folder / "slurmctld.out", variables))
        for node in nodes:
            command = ["slurmd", *given, "-N", node]
            stack.enter_context(_running(command, folder / f"slurmd.{node}.out", variables))
        stack.callback(_cancel_all, variables)
        _wait_until_idle(variables, folder)
        yield found


def _munged(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    places = {"key": key, "pid": folder / "munged.pid"}
    places |= {"log": folder / "munged.log", "seed": folder / "munged.seed"}
    munged = ["munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}"]
    return [*munged, *(f"--{name}-file={path}" for name, path in places.items())]


@contextlib.contextmanager
def _running(command: Sequence[str], output: Path, variables: dict[str, str]) -> Iterator[None]:
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


def _cancel_all(variables: dict[str, str]) -> None:
    for kill in ([], ["--signal=KILL", "--full"]):
        subprocess.run(
            ["scancel", "--user=root", *kill], capture_output=True, env=variables, timeout=60
        )


def processes_of(configuration: Path) -> list[int]:
    """Return the ids of the processes that were started with a cluster's configuration."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = str(configuration).encode() in (folder / "environ").read_bytes()
            if is_ours and alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def kill_all(configuration: Path) -> None:
    """Kill what is left of a cluster: daemons, steps, and the programs of jobs."""
    while left := processes_of(configuration):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


@contextlib.contextmanager
def _guarded(configuration: Path) -> Iterator[None]:
    """Have everything killed after the context, also where this process is killed in it."""
    guard = "import sys; sys.stdin.read(); from pathlib import Path; from tests import slurm; "
    command = python("-c", f"{guard} slurm.kill_all(Path(sys.argv[1]))", str(configuration))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    try:
        yield
    finally:
        process.communicate(timeout=SECONDS)
    assert processes_of(configuration) == []


def _wait_until_idle(variables: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        answer = subprocess.run(command, capture_output=True, text=True, env=variables)
        if set(answer.stdout.split()) == {"idle"}:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise TimeoutError(f"no idle node: {answer.stdout} {answer.stderr}\n{logs}")
        time.sleep(0.3)
