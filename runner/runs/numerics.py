"""Threads and determinism of one process. Free of torch at import.

Sums of floating-point numbers depend on how they are split over threads. The number is therefore
chosen once per run and written down; a run with ``deterministic=true`` keeps it when it is resumed.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.machine import env
from runner.recipe import machines
from runner.recipe.schema import Recipe
from runner.runs import sessions
from runner.runs.json_files import write_json

FILE = "threads.json"
# cuBLAS gives the same bits only with a workspace of fixed size.
# Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
CUBLAS_WORKSPACE = ":4096:8"
# Idle threads of OpenMP spin by default, which slows down every other program on the same cores.
# Source: https://gcc.gnu.org/onlinedocs/libgomp/OMP_005fWAIT_005fPOLICY.html
WAIT_POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Numerics:
    """How a process computes.

    `num_threads` is None for torch's own choice; `deterministic`: results are bit-equal from run to
    run.
    """

    num_threads: int | None = None
    deterministic: bool = False

    def exported(self) -> AbstractContextManager[None]:
        """Set the environment variables that numeric libraries read while they are loaded."""
        variables: dict[str, object] = {}
        if self.num_threads is not None:
            variables["OMP_NUM_THREADS"] = self.num_threads
        if self.deterministic:
            variables["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
        return env.patched(**variables)

    def apply(self) -> None:
        """Set the same in torch, which may have been loaded before."""
        import torch

        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False


def sleeping_when_idle() -> AbstractContextManager[None]:
    """Let idle threads sleep, unless the person has chosen; for libraries that are loaded later."""
    return env.patched(**{WAIT_POLICY: env.read(WAIT_POLICY) or "PASSIVE"})


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose(recipe: Recipe, local_processes: int) -> int | None:
    """Return the intra-op threads of each process; None: torch's own choice.

    The recipe comes first, then OMP_NUM_THREADS, then an even share of the cores; in a Ray cluster,
    the cores that Ray gives each process.
    """
    if recipe.distributed.num_threads is not None:
        return recipe.distributed.num_threads
    if recipe.distributed.kind == machines.RAY:
        return max(1, int(recipe.distributed.ray.cpus))
    given = env.integer("OMP_NUM_THREADS")
    if given is not None:
        return given
    if local_processes > 1 or recipe.deterministic:
        return max(1, cores() // local_processes)
    return None


def of(recipe: Recipe, local_processes: int, run_dir: Path | None) -> Numerics:
    """Return how each process of a run computes; without `run_dir` the run is a new one.

    A deterministic run that is resumed keeps the number of threads that it started with, on
    whatever machine.
    """
    kept = None
    if run_dir is not None and recipe.deterministic and recipe.distributed.num_threads is None:
        kept = read(run_dir).num_threads
    number = choose(recipe, local_processes) if kept is None else kept
    return Numerics(number, recipe.deterministic)


def record_threads(folder: Path, recipe: Recipe, local_processes: int) -> None:
    """Choose the number of threads and write it down for all processes of a session."""
    found = of(recipe, local_processes, sessions.run_dir_of(folder))
    write_json(folder / FILE, asdict(found))


def read(run_dir: Path) -> Numerics:
    """Return the numerics that were recorded for a run, or for one of its sessions."""
    found = sessions.read(run_dir, FILE)
    return Numerics() if found is None else Numerics(**json.loads(found))
