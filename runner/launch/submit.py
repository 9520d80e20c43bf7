"""From a checked recipe to a job on Slurm: frozen in its run directory, handed over by sbatch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from accel.machine import env
from accel.machine.errors import ConfigError
from runner.launch import batch_script, start_run
from runner.recipe import processes
from runner.recipe.schema import Recipe
from runner.runs import outcomes, sessions, slurm_job
from runner.runs.json_files import write_json

SBATCH = "sbatch"
# Those of a job that this command itself runs in; sbatch would take some of them for options.
OF_SLURM, KEPT = "SLURM_", ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has taken, and the run directory that it trains in."""

    job_id: str
    run_dir: Path

    @property
    def log(self) -> Path:
        """The output of the job."""
        return outcomes.log_folder(self.run_dir) / f"slurm-{self.job_id}.out"


def require_slurm() -> None:
    """Raise a ConfigError where there is no Slurm to submit to."""
    if shutil.which(SBATCH) is None:
        rule = f"there is no {SBATCH} on this machine"
        raise ConfigError.of("runner submit", rule, "Give the command on a node of the cluster.")


def as_in_the_job(recipe: Recipe) -> AbstractContextManager[None]:
    """Return a context with the variables that rank 0 of the submitted job will have.

    Raises:
        ConfigError: if the recipe contradicts what it asks Slurm for.
    """
    return _as_rank_zero(recipe, batch_script.tasks_per_node(recipe))


@contextlib.contextmanager
def _as_rank_zero(recipe: Recipe, local: int) -> Iterator[None]:
    size = local * recipe.submit.nodes
    place: Mapping[str, object] = {
        **{"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": 0},
    }
    alone = dict.fromkeys(place)
    with env.patched(**(place if size > 1 else alone)):
        with processes.accelerators_expected(recipe.submit.gpus_per_node or 0):
            yield


def submit(
    recipe: Recipe,
    overrides: Sequence[str],
    config_name: str,
    *,
    origin: str | None = None,
    auto: bool = False,
    log_levels: Mapping[str, str] | None = None,
) -> Submitted:
    """Freeze a checked job in its run directory, and hand it to Slurm; arguments as for `start`.

    Where Slurm refuses it, a new run leaves no directory behind.

    Raises:
        ConfigError: as `start_run.start` does, if an earlier job of the run is still queued, or if
            Slurm refuses it.
    """
    if recipe.resume is not None:
        _require_no_job(Path(recipe.resume))
    submitted: list[Submitted] = []

    def hand_over(folder: Path, frozen: Recipe) -> None:
        submitted.append(_sbatch(folder, frozen))

    start_run.freeze(
        recipe,
        overrides,
        config_name,
        origin=origin,
        auto=auto,
        on_frozen=hand_over,
        log_levels=log_levels,
    )
    return submitted[0]


def _require_no_job(run_dir: Path) -> None:
    job_id = sessions.submitted_job(run_dir)
    state = slurm_job.queue().get(job_id) if job_id else None
    if state:
        rule = f"Slurm's job {job_id} trains it (state {state})"
        remedy = f"Wait for its end, or end it with `scancel {job_id}`."
        raise ConfigError.of(f"resume={str(run_dir)!r}", rule, remedy)


def _sbatch(folder: Path, frozen: Recipe) -> Submitted:
    script, run_dir = folder / slurm_job.SCRIPT, sessions.run_dir_of(folder)
    outcomes.log_folder(run_dir)  # Slurm makes no folder
    script.write_text(batch_script.text(frozen, folder, os.getcwd()), encoding="utf-8")
    given = env.copy()
    variables = {k: v for k, v in given.items() if not k.startswith(OF_SLURM) or k in KEPT}
    command = [SBATCH, "--parsable", str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables)
    if answer.returncode != 0:
        rule = " ".join(answer.stderr.split()) or f"{SBATCH} ended with {answer.returncode}"
        raise ConfigError.of("runner submit", rule, "Correct submit.*; sinfo lists partitions.")
    job_id = answer.stdout.strip().partition(";")[0]
    write_json(folder / sessions.SUBMITTED, {"job": job_id})
    return Submitted(job_id, run_dir)
