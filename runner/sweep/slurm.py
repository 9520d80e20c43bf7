"""Jobs of a sweep on Slurm: submitit hands them over as one array.

How a job has ended is read from its run, and whether it is still to come from the queue, so that
Slurm needs no accounting. Elements that an earlier command has left waiting in the queue are
cancelled; what runs of them is waited for, and not submitted again.

Rank 0 trains the job and records its end; the others join it. A job that is stopped has its state
saved, and is queued again where Slurm does not do so itself:

| signal | what follows |
|---|---|
| SIGUSR2 (submitit's) before the time limit | queued again, at most `max_num_timeout` times |
| SIGUSR2 or SIGTERM while the job is preempted | queued again |
| SIGTERM of ``scontrol requeue`` | Slurm queues it again |
| SIGTERM of ``scancel``, or of the command that began the sweep | not queued again |

Source: https://slurm.schedmd.com/preempt.html; https://facebookincubator.github.io/submitit/
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from accel.machine import env
from accel.machine.errors import StateError
from runner.exit_codes import DONE, FAILED, STOPPED
from runner.launch import launcher, slurm, worker
from runner.launch.group import Stops, stops_heard
from runner.recipe import processes
from runner.runs import lock
from runner.runs.record import RunRecord
from runner.sweep.job import Task
from runner.sweep.sweep import job_dir

FOLDER, MOST_TIMEOUTS = "submitit_folder", "max_num_timeout"
# Parameters that submitit has on every kind of cluster; the others are Slurm's.
SHARED = (
    *("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
    *("name", "stderr_to_stdout"),
)
PREEMPT_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"
LOOK_SECONDS, MOST_SECONDS = 0.5, 15.0
# A job that fails in one process would leave the others waiting in a collective.
SRUN = ["--kill-on-bad-exit=1"]


def launch(
    task: Task, settings: Mapping[str, Any], job_overrides: Sequence[Sequence[str]], first: int
) -> Sequence[JobReturn]:
    """Run jobs to their ends; their objectives are the results.

    Args:
        task: of the sweep.
        settings: `hydra.launcher`.
        job_overrides: of each job.
        first: as Hydra counts the first of them.
    """
    settings = OmegaConf.to_container(OmegaConf.create(dict(settings)))  # type: ignore[assignment]
    jobs = {task.number(n): list(overrides) for n, overrides in enumerate(job_overrides, first)}
    run_dirs = {number: job_dir(Path(task.folder), number) for number in jobs}
    _cancel_earlier(Path(settings[FOLDER]).parent)
    held = [number for number in jobs if lock.holder(run_dirs[number]) is not None]
    for number in held:
        print(f"job {number:04} is being trained: it is waited for", flush=True)
    ids: list[str] = []
    if new := [number for number in jobs if number not in held]:
        ids = _submit(task, settings, new, [jobs[number] for number in new])
        array = ids[0].partition("_")[0]
        print(f"Slurm: job {array}, {len(new)} runs (scancel {array} stops them)", flush=True)
    try:
        with stops_heard() as stops:
            _wait(ids, [run_dirs[number] for number in held], stops)
    except KeyboardInterrupt:
        slurm.cancel(*ids)
        raise
    if stops.received:
        raise SystemExit(STOPPED)
    ended = {number: RunRecord(path) for number, path in run_dirs.items()}
    codes = {n: DONE if run.is_done else run.tried.get("code", FAILED) for n, run in ended.items()}
    return task.returned(job_overrides, first, codes)


def _cancel_earlier(folder: Path) -> None:
    """Cancel what waits in the queue of earlier commands on the sweep."""
    arrays = {path.name.partition("_")[0] for path in folder.glob("[0-9]*")}
    before = [i for i in slurm.queue() if i.partition("_")[0] in arrays]
    slurm.cancel(*before, state=slurm.PENDING)


def _submit(
    task: Task, settings: Mapping[str, Any], numbers: list[int], overrides: list[list[str]]
) -> list[str]:
    """Submit jobs as an array; return their ids, as squeue shows them."""
    import submitit

    executor = submitit.AutoExecutor(folder=settings[FOLDER], cluster="slurm")
    given = {
        name if name in SHARED else f"slurm_{name}": value
        for name, value in settings.items()
        if value is not None and name not in (FOLDER, MOST_TIMEOUTS)
    }
    executor.update_parameters(**{**given, "slurm_srun_args": SRUN})
    called = SlurmTask(task, int(settings.get(MOST_TIMEOUTS) or 0))
    return [str(job.job_id) for job in executor.map_array(called, numbers, overrides)]


def _wait(ids: Collection[str], held: Collection[Path], stops: Stops) -> None:
    """Wait until the jobs are neither queued nor run; cancel them if the command is stopped.

    The runs of `held` are trained in elements of an earlier command.
    """
    seconds, is_cancelled, trouble = LOOK_SECONDS, False, ""
    while True:
        try:
            if stops.received and not is_cancelled:
                slurm.cancel(*ids)
                is_cancelled, seconds = True, LOOK_SECONDS
            is_left = not is_cancelled and any(map(lock.holder, held))
            if not slurm.queue().keys() & set(ids) and not is_left:
                return
            trouble = ""
        except StateError as error:  # the controller restarts
            if str(error) != trouble:
                print(f"{error}; asking again", file=sys.stderr, flush=True)
            trouble = str(error)
        time.sleep(seconds)
        seconds = LOOK_SECONDS if stops.received else min(seconds * 1.2, MOST_SECONDS)


# -- in a job of Slurm's --------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmTask:
    """A job of a sweep, as each process of a job of Slurm's runs it; it can be pickled.

    Args:
        task: the task of the sweep.
        max_num_timeout: how often a job is queued again after its time limit.
    """

    task: Task
    max_num_timeout: int = 0

    def __call__(self, number: int, overrides: list[str]) -> None:
        """Train a job. Returns where it is complete; else the process is ended with its code."""
        place = processes.adopted()
        with _warning_taken() as warned:
            if place is None:
                code = self.task.train_as_child(number, overrides)
            elif place.rank > 0:
                code = launcher.follow(place)
                code = DONE if code == STOPPED else code
            else:
                code = self.task.train(number, overrides)
                if code == DONE:  # perhaps it was complete before
                    launcher.release_followers()
            if code == STOPPED:
                self._queue_again(warned.is_set())
        if code != DONE:
            worker.end_process(code)

    def _queue_again(self, is_warned: bool) -> None:
        """Queue the job again after a stop, unless Slurm does, or is ending it."""
        try:
            if slurm.field("JobState") != slurm.RUNNING:
                return
            is_preempted = slurm.field("PreemptTime") not in ("", "None")
            restarts = int(env.read("SLURM_RESTART_COUNT") or 0)
            if is_warned and not is_preempted and restarts >= self.max_num_timeout:
                print(
                    f"The time is up, and hydra.launcher.max_num_timeout={self.max_num_timeout}: "
                    "the job is not queued again. The same command goes on with it.",
                    flush=True,
                )
                return
            print("The state is saved; the job is queued again.", flush=True)
            slurm.requeue()
        except StateError as error:
            print(f"The job could not be queued again: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _warning_taken() -> Iterator[threading.Event]:
    """Take submitit's signal in the context: it stops the run; the event is then set.

    It is blocked here and, by inheritance, in workers and loaders, which Slurm may send it to as
    well and which it would end.
    """
    number = getattr(signal, f"SIG{env.read(PREEMPT_SIGNAL) or 'USR2'}")
    warned, ended = threading.Event(), threading.Event()

    def wait() -> None:
        while not ended.is_set():
            if signal.sigtimedwait([number], LOOK_SECONDS) is not None:
                warned.set()
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    thread = threading.Thread(target=wait, name="slurm-warning", daemon=True)
    thread.start()
    try:
        yield warned
    finally:
        ended.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
