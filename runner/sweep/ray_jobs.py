"""Jobs of a sweep in a Ray cluster: each is a process under an actor, where Ray finds room.

`Jobs` is to the pool of a sweep what the fork server and this machine are here. Free of torch.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from runner.launch import ray as cluster
from runner.launch.fork_server import Order
from runner.launch.ray import Actor
from runner.recipe import machines, plugins, processes
from runner.recipe.schema import Recipe
from runner.sweep.devices import THREADS, Share

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from runner.sweep.job import Task

CPUS, GPUS = "CPU", "GPU"
# Jobs that wait in Ray for room, beyond those that run: what an autoscaler goes by.
MOST_WAITING = 8


class Jobs:
    """Starts jobs in the cluster, and says how many may wait there.

    Args:
        ray: the module, connected to a cluster.
        settings: `hydra.launcher`, as `plugins.RayConf` has it.
    """

    jobs = 0  # at once: as Ray has room

    def __init__(self, ray: ModuleType, settings: Mapping[str, Any]) -> None:
        self._ray, self._settings = ray, settings
        self._jobs: list[Actor] = []
        self._short: set[str] = set()  # notes that have been printed

    # -- room ------------------------------------------------------------------------------

    def share_of(self, recipe: Recipe) -> Share | None:
        """Return what a recipe's job gets; None: enough others wait already."""
        self._jobs = [job for job in self._jobs if job.status is None]
        if sum(not job.pid for job in self._jobs) >= MOST_WAITING:
            return None
        number = processes.count(recipe.distributed)
        threads = recipe.distributed.num_threads or 1
        wanted: dict[str, float] = {CPUS: number * threads, GPUS: 0}
        if processes.device(recipe.distributed) != "cpu" and cluster.num_gpus(self._ray):
            wanted[GPUS] = number
        if recipe.distributed.kind == machines.RAY:  # they have a placement group
            wanted = {CPUS: 0, GPUS: 0}
        for name, given in ((CPUS, "num_cpus"), (GPUS, "num_gpus")):
            if self._settings[given] is not None:
                wanted[name] = float(self._settings[given])
        share = max(1, int(wanted[CPUS] // number))
        resources = {**wanted, **self._settings["resources"]}
        self._note_shortage(resources)
        environment = {**cluster.environment(self._ray), THREADS: str(share)}
        return Share((), share, environment, resources)

    def _note_shortage(self, resources: Mapping[str, float]) -> None:
        """Print once what no node has: Ray waits for one that does."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fits = any(all(n.get(k, 0) >= v for k, v in resources.items()) for n in nodes)
        text = ", ".join(f"{name} {amount:g}" for name, amount in resources.items() if amount)
        if not fits and text not in self._short:
            self._short.add(text)
            line = f"A job wants {text}, and no node of the Ray cluster has as much: it waits."
            print(line, file=sys.stderr, flush=True)

    def give_back(self, share: Share) -> None:
        """Do nothing: Ray has its resources back with the end of the actor."""

    # -- processes -------------------------------------------------------------------------

    def start(self, order: Order) -> Actor:
        """Have a job started as soon as there is room."""
        resources = dict(order.resources)
        actor = cluster.host(
            self._ray,
            cpus=resources.pop(CPUS),
            gpus=resources.pop(GPUS),
            resources=resources,
            runtime_env=self._settings["runtime_env"],
        )
        order = replace(order, cwd=cluster.cwd(self._settings["runtime_env"]))
        job = Actor(self._ray, actor, order, on_lost=partial(_lost, order.number), waits=True)
        self._jobs.append(job)
        return job

    def wait(self, seconds: float) -> None:
        """Wait so many seconds."""
        time.sleep(seconds)


def _lost(number: int, reason: str) -> int:
    print(f"job {number:04}: Ray has lost it: {reason}", file=sys.stderr)
    return -signal.SIGKILL


def launch(
    task: Task, settings: Mapping[str, Any], job_overrides: Sequence[Sequence[str]], first: int
) -> Sequence[JobReturn]:
    """Run jobs to their ends in a cluster; their objectives are the results.

    Args:
        task: of the sweep.
        settings: `hydra.launcher`, as `plugins.RayConf` has it.
        job_overrides: of each job.
        first: as Hydra counts the first of them.
    """
    with cluster.connected(settings["address"], f"{plugins.LAUNCHER}.address") as ray:
        jobs = Jobs(ray, settings)
        return task.run_with(jobs, jobs, job_overrides, first)
