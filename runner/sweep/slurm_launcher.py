"""Hydra's launcher of a sweep's jobs on Slurm: submitit hands them over as one array.

How a job has ended is read from the sweep's journal, and whether it is still to come from the
queue, so that Slurm needs no accounting. Elements that an earlier command has left waiting in the
queue are cancelled; what runs of them is waited for, and not submitted again.

Source: https://facebookincubator.github.io/submitit/
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from accel.machine.errors import StateError
from runner.exit_codes import DONE, FAILED, STOPPED
from runner.run_dir import slurm_job
from runner.sweep.journal import JobState, Journal
from runner.sweep.slurm_task import SlurmTask
from runner.sweep.task import closed
from runner.sweep.task_launcher import TaskLauncher

if TYPE_CHECKING:
    from submitit import AutoExecutor

FOLDER = "submitit_folder"
# Parameters that submitit has on every kind of cluster; the others are Slurm's.
SHARED = (
    *("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
    *("name", "stderr_to_stdout"),
)
LOOK_SECONDS, MOST_SECONDS = 0.5, 15.0
# A job that fails in one process would leave the others waiting in a collective.
SRUN = ["--kill-on-bad-exit=1"]


class SlurmLauncher(TaskLauncher):
    """Runs jobs of a sweep as an array on Slurm; takes the keys of `hydra.launcher`."""

    def __init__(self, **params: Any) -> None:
        self._params = params

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs to their ends; their objectives are the results."""
        task = self.task_function
        jobs = {
            task.number(initial_job_idx + index): closed(overrides)
            for index, overrides in enumerate(job_overrides)
        }
        journal = Journal(Path(task.folder))
        ids = self._left_running(journal, jobs)
        new = [number for number in jobs if number not in ids]
        if new:
            submitted = self._submit(new, [jobs[number] for number in new])
            ids |= dict(zip(new, submitted, strict=True))
            array = submitted[0].partition("_")[0]
            print(f"Slurm: job {array}, {len(new)} runs (scancel {array} stops them)", flush=True)
        try:
            self._wait(ids, journal)
        except KeyboardInterrupt:
            slurm_job.cancel(*ids.values())
            raise
        if task.is_stopped:
            raise SystemExit(STOPPED)
        states = journal.states()
        codes = {number: _code_of(states.get(number)) for number in jobs}
        return task.returned(job_overrides, initial_job_idx, codes)

    def _left_running(self, journal: Journal, jobs: Collection[int]) -> dict[int, str]:
        """Cancel what waits of earlier commands on the sweep; return what runs, by job number."""
        folder = Path(str(self._params[FOLDER])).parent
        arrays = {path.name.partition("_")[0] for path in folder.glob("[0-9]*")}
        before = {i for i in slurm_job.queue() if i.partition("_")[0] in arrays}
        slurm_job.cancel(*before, state=slurm_job.PENDING)
        left = before & slurm_job.queue().keys()
        states = journal.states()
        found = {number: states[number].slurm for number in jobs if number in states}
        running = {n: i for n, i in found.items() if i in left and not states[n].ended}
        for number, job_id in running.items():
            print(f"job {number:04} runs as Slurm's job {job_id}: it is waited for", flush=True)
        return running

    def _submit(self, numbers: list[int], overrides: list[list[str]]) -> list[str]:
        """Submit jobs as an array; return their ids, as squeue shows them."""
        import submitit

        executor: AutoExecutor = submitit.AutoExecutor(folder=self._params[FOLDER], cluster="slurm")
        executor.update_parameters(**self._given())
        task = SlurmTask(self.task_function, int(self._params.get("max_num_timeout") or 0))
        return [str(job.job_id) for job in executor.map_array(task, numbers, overrides)]

    def _given(self) -> dict[str, Any]:
        given = {
            name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for name, value in self._params.items()
            if value is not None and name not in (FOLDER, "max_num_timeout")
        }
        named = {name if name in SHARED else f"slurm_{name}": v for name, v in given.items()}
        return {**named, "slurm_srun_args": SRUN}

    def _wait(self, ids: Mapping[int, str], journal: Journal) -> None:
        """Wait until the jobs are neither queued nor run; cancel them if the command is stopped."""
        seconds, is_cancelled, trouble = LOOK_SECONDS, False, ""
        while True:
            try:
                if self.task_function.is_stopped and not is_cancelled:
                    slurm_job.cancel(*ids.values())
                    is_cancelled, seconds = True, LOOK_SECONDS
                if not slurm_job.queue().keys() & set(ids.values()):
                    return
                trouble = ""
            except StateError as error:  # the controller restarts
                if str(error) != trouble:
                    print(f"{error}; asking again", file=sys.stderr, flush=True)
                trouble = str(error)
            states = journal.states()
            if all(number in states and states[number].is_complete for number in ids):
                return
            time.sleep(seconds)
            seconds = LOOK_SECONDS if self.task_function.is_stopped else seconds * 1.2
            seconds = min(seconds, MOST_SECONDS)


def _code_of(state: JobState | None) -> int:
    if state is None:
        return FAILED
    if state.is_complete:
        return DONE
    code = state.ended.get("code")
    return code if isinstance(code, int) else FAILED
