"""Devices and cores of this machine for the jobs of a sweep. Free of torch at import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel.machine import env
from runner.recipe import processes
from runner.recipe.schema import Recipe
from runner.runs import numerics
from runner.sweep.settings import AUTO, Jobs

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Need:
    """What a job computes on: processes, GPUs, and threads of each process (None: any)."""

    processes: int = 1
    gpus: int = 0
    threads: int | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Need:
        """Return the need of a recipe.

        Raises:
            ConfigError: if the number of processes contradicts the machine.
        """
        number = processes.count(recipe.distributed)
        on_gpu = processes.device(recipe.distributed) != "cpu" and processes.num_accelerators() > 0
        return cls(number, number if on_gpu else 0, recipe.distributed.num_threads)


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

    has_queue = False

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
        """Return the share of a recipe's job that starts now; None: it has to wait."""
        return self.take(Need.of(recipe))

    def take(self, need: Need) -> Share | None:
        """Return the share of a job that starts now; None: it has to wait."""
        if self.jobs == AUTO:
            cores = need.processes * (need.threads or env.integer(THREADS, 1))
            free = sum(count == 0 for count in self._used.values())
            enough = free >= need.gpus if need.gpus else self._free_cores >= cores
            if self._running and not enough:
                return None
        else:
            if self._running >= self.jobs:
                return None
            cores = max(1, self._cores // self.jobs)
        chosen = tuple(sorted(self._used, key=lambda name: self._used[name])[: need.gpus])
        self._used.update(chosen)
        self._free_cores -= cores
        self._running += 1
        return Share(chosen, cores, self._environment(chosen, cores, need))

    def _environment(self, gpus: Sequence[str], cores: int, need: Need) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        if self._used:
            found[VISIBLE] = ",".join(gpus)  # a job on the CPU sees none
        alone = self.jobs == 1
        if not alone and env.read(THREADS) is None and not (gpus and self.jobs == AUTO):
            found[THREADS] = str(max(1, cores // need.processes))
        elif not alone and gpus and env.read(THREADS) is None:
            share = self._cores * len(gpus) // max(1, len(self._used))
            found[THREADS] = str(max(1, share // need.processes))
        return found

    def give_back(self, share: Share) -> None:
        """Free the share of a job that has ended."""
        self._used.subtract(share.gpus)
        self._free_cores += share.cores
        self._running -= 1
