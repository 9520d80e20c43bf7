"""Rank, world size and rendezvous of processes that mpirun or srun started. Free of torch.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR, …; other launchers have variables of their own:

| launcher | variables |
|---|---|
| Open MPI's mpirun | ``OMPI_COMM_WORLD_*`` |
| MVAPICH2's mpirun | ``MV2_COMM_WORLD_*`` |
| MPICH's and Intel's mpirun | ``PMI_*``, ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS`` |
| Slurm's srun | ``SLURM_PROCID``, ``SLURM_LOCALID``, ``SLURM_STEP_*`` |

Source: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html;
    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES;
    https://mvapich.cse.ohio-state.edu/userguide/
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from accel.machine.errors import ConfigError, Problem

# Below Linux's ephemeral ports (32768 and above), so that no outgoing connection holds one.
PORTS = range(15000, 30000)
LOOPBACK = "127.0.0.1"
# For torchelastic's agents: workers get a store of their own, as torch 2.13's restarts need.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Variables that name one job, and so keep the ports and keys of two jobs apart.
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MV2_COMM_WORLD_JOBID")
REMEDY = (
    "Set MASTER_ADDR (a host name of rank 0) and MASTER_PORT in each process, as "
    "mpirun -x MASTER_ADDR -x MASTER_PORT does; or start with torchrun (under srun: one task per "
    "node, srun --ntasks-per-node=1 torchrun …); WORLD_SIZE=1 if each is a run of its own."
)


@dataclass(frozen=True)
class Launched:
    """One of several processes of a launcher.

    Args:
        source: the variable that gives the world size (or shows that there are several).
        world_size: number of processes.
        rank: index of this process; None: not given.
        local_rank: index on its node; None: not given.
        local_world_size: number of processes on this node; None: not given.
        host: host of rank 0; None: not given.
        port: TCP port there that the launcher has reserved; None: not given.
        job: the launcher's name of the job.
        devices: number of GPUs that only this process sees; None: it sees those of its node.
    """

    source: str
    world_size: int
    rank: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    host: str | None = None
    port: int | None = None
    job: str = ""
    devices: int | None = None

    @property
    def master_addr(self) -> str | None:
        """Host of the rendezvous: that of rank 0, or the loopback address on a single node."""
        return LOOPBACK if self.local_world_size == self.world_size else self.host

    @property
    def master_port(self) -> int | None:
        """TCP port of the rendezvous, the same on each process: reserved, or from the job's name.

        A port that another program holds makes rank 0 fail; the job's name in the keys of the store
        keeps two jobs apart.
        """
        if self.port is not None or not self.job:
            return self.port
        return PORTS[zlib.crc32(self.job.encode()) % len(PORTS)]

    def problem(self, master_addr: str | None, master_port: int | None) -> Problem | None:
        """Return why the processes could not join each other, or None.

        Args:
            master_addr: host of the rendezvous, given or derived.
            master_port: its port, given or derived.
        """
        names: dict[str, object] = {"rank": self.rank, "local rank": self.local_rank}
        names |= {"processes per node": self.local_world_size}
        names |= {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
        missing = [name for name, value in names.items() if value is None]
        if not missing:
            return None
        return Problem(
            f"{self.source} shows {self.world_size} processes, and WORLD_SIZE is not set",
            f"a process group needs {', '.join(missing)}, which this launcher does not give; "
            "without it each process would train the full model by itself and write the same files",
            REMEDY,
        )


def read(variables: Mapping[str, str]) -> Launched | None:
    """Return this process's place among those of mpirun or srun; None: there is one process.

    mpirun goes before Slurm: it may start its daemons, one per node, by srun.

    Raises:
        ConfigError: for a number that is none.
    """
    found = _mpi(variables, "OMPI_COMM_WORLD") or _mpi(variables, "MV2_COMM_WORLD")
    return found or _pmi(variables) or _slurm(variables)


def integer(variables: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number, None where it is unset or empty, or raise `ConfigError`."""
    text = variables.get(name, "").strip()
    try:
        return int(text) if text else None
    except ValueError:
        rule, remedy = "expected an integer", f"Correct or unset {name}."
        raise ConfigError.of(f"{name}={text!r} (environment)", rule, remedy) from None


def _several(variables: Mapping[str, str], name: str) -> int | None:
    """Return the number of processes in `name`, None for one."""
    size = integer(variables, name)
    return size if size is not None and size > 1 else None


def _mpi(variables: Mapping[str, str], prefix: str) -> Launched | None:
    size = _several(variables, f"{prefix}_SIZE")
    if size is None:
        return None
    return Launched(
        f"{prefix}_SIZE={size}",
        size,
        integer(variables, f"{prefix}_RANK"),
        integer(variables, f"{prefix}_LOCAL_RANK"),
        integer(variables, f"{prefix}_LOCAL_SIZE"),
        # In a Slurm job mpirun places the first rank on the first node.
        host=first_host(variables.get("SLURM_JOB_NODELIST", "")),
        job=_job(variables),
    )


def _pmi(variables: Mapping[str, str]) -> Launched | None:
    size = _several(variables, "PMI_SIZE")
    if size is None:
        return None
    rank = integer(variables, "PMI_RANK")
    slurm = _slurm(variables)  # srun --mpi=pmi2 sets the variables of both
    if slurm is not None and (slurm.world_size, slurm.rank) == (size, rank):
        return slurm
    return Launched(
        f"PMI_SIZE={size}",
        size,
        rank,
        integer(variables, "MPI_LOCALRANKID"),
        integer(variables, "MPI_LOCALNRANKS"),
        host=first_host(variables.get("SLURM_JOB_NODELIST", "")),
        job=_job(variables),
    )


def _slurm(variables: Mapping[str, str]) -> Launched | None:
    # SLURM_NTASKS counts the tasks of a job, of which a script without srun is none.
    size = _several(variables, "SLURM_STEP_NUM_TASKS")
    if size is None:
        return None
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    gpus = re.search(r"(\d+)$", variables.get("SLURM_GPUS_PER_TASK", ""))  # "2" or "a100:2"
    ports = re.match(r"\d+", variables.get("SLURM_STEP_RESV_PORTS", ""))  # srun --resv-ports
    return Launched(
        f"SLURM_STEP_NUM_TASKS={size}",
        size,
        integer(variables, "SLURM_PROCID"),
        integer(variables, "SLURM_LOCALID"),
        _tasks_here(variables, size),
        host=first_host(nodes),
        port=int(ports[0]) if ports else None,
        job=_job(variables),
        devices=int(gpus[1]) if gpus else None,
    )


def _job(variables: Mapping[str, str]) -> str:
    """Return the name of the job, the same on each of its processes; "" where there is none."""
    named = next((variables[name] for name in JOBS if variables.get(name)), "")
    places = ("CLUSTER_NAME", "JOB_ID", "STEP_ID")
    steps = (variables.get(f"SLURM_{name}", "") for name in places)
    return ".".join(part for part in (*steps, named) if part)


def _tasks_here(variables: Mapping[str, str], size: int) -> int | None:
    """Return the number of tasks of a Slurm step on this node."""
    tasks = tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = integer(variables, "SLURM_NODEID") or 0
    if sum(tasks) == size and node < len(tasks):
        return tasks[node]
    return size if integer(variables, "SLURM_STEP_NUM_NODES") == 1 else None


def tasks_per_node(text: str) -> list[int]:
    """Return the numbers that Slurm writes as ``"2(x3),1"``: 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, repeated in found for _ in range(int(repeated or 1))]


def first_host(nodes: str) -> str | None:
    """Return the first host of a list in Slurm's notation: ``"gpu[07-09,12],cpu1"`` → gpu07.

    Source: https://slurm.schedmd.com/scontrol.html#OPT_hostlist
    """
    head = re.match(r"[^,\[]+", nodes)
    if head is None:
        return None
    host, rest = head[0], nodes[head.end() :]
    while (group := re.match(r"\[(\d+)[^\]]*\]([^,\[]*)", rest)) is not None:
        host, rest = host + group[1] + group[2], rest[group.end() :]
    return host
