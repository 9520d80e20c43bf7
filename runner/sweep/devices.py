"""Devices and cores of this machine for the jobs of a sweep. Free of torch at import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel.machine import env
from runner.recipe import processes
from runner.recipe.schema import Recipe
from runner.runs import numerics
from runner.sweep.plan import AUTO, Jobs

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Share:
    """What a job gets: GPUs by index or name, and cores; in a cluster, resources by name."""

    gpus: tuple[str, ...]
    cores: int
    environment: Mapping[str, str | None]
    resources: Mapping[str, float] = field(default_factory=dict)


class Machine:
    """Gives each job its own GPUs and threads; at most `jobs` run at once.

    With "auto" a job waits until its GPUs, or its cores, are free; else jobs may share GPUs, the
    least used ones first. Memory is not considered.
    """

    def __init__(self, jobs: Jobs, gpus: Sequence[str] = (), cores: int | None = None) -> None:
        self.jobs = jobs
        self._cores = cores or numerics.cores()
        self._free_cores = self._cores
        self._used = Counter(dict.fromkeys(gpus, 0))
        self._running = 0

    @classmethod
    def here(cls, jobs: Jobs) -> Machine:
        """Return this machine, with the GPUs that this process sees."""
        visible = env.read(VISIBLE)
        named = [name.strip() for name in (visible or "").split(",") if name.strip()]
        if visible is None:
            named = [str(index) for index in range(processes.num_accelerators())]
        return cls(jobs, named)

    def share_of(self, recipe: Recipe) -> Share | None:
        """Return the share of a recipe's job that starts now; None: it has to wait.

        Raises:
            ConfigError: if the number of processes contradicts the machine.
        """
        distributed = recipe.distributed
        number = processes.count(distributed)
        on_gpu = processes.device(distributed) != "cpu" and processes.num_accelerators() > 0
        return self.take(number, number if on_gpu else 0, distributed.num_threads)

    def take(
        self, num_processes: int = 1, gpus: int = 0, threads: int | None = None
    ) -> Share | None:
        """Return the share of a job that starts now; None: it has to wait.

        Args:
            num_processes: its processes.
            gpus: its GPUs.
            threads: those of each process; None: any number.
        """
        if self.jobs == AUTO:
            cores = num_processes * (threads or env.integer(THREADS, 1))
            free = sum(count == 0 for count in self._used.values())
            enough = free >= gpus if gpus else self._free_cores >= cores
            if self._running and not enough:
                return None
        else:
            if self._running >= self.jobs:
                return None
            cores = max(1, self._cores // self.jobs)
        chosen = tuple(sorted(self._used, key=lambda name: self._used[name])[:gpus])
        self._used.update(chosen)
        self._free_cores -= cores
        self._running += 1
        return Share(chosen, cores, self._environment(chosen, cores, num_processes))

    def _environment(
        self, gpus: Sequence[str], cores: int, num_processes: int
    ) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        if self._used:
            found[VISIBLE] = ",".join(gpus)  # a job on the CPU sees none
        if self.jobs != 1 and env.read(THREADS) is None:
            if gpus and self.jobs == AUTO:
                cores = self._cores * len(gpus) // len(self._used)
            found[THREADS] = str(max(1, cores // num_processes))
        return found

    def give_back(self, share: Share) -> None:
        """Free the share of a job that has ended."""
        self._used.subtract(share.gpus)
        self._free_cores += share.cores
        self._running -= 1
