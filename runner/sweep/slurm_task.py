"""One job of a sweep in a job of Slurm's: what submitit calls there, in each of its processes.

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
from collections.abc import Iterator
from dataclasses import dataclass

from accel.machine import env
from accel.machine.errors import StateError
from runner.exit_codes import DONE, STOPPED
from runner.launch import launcher, worker
from runner.recipe import processes
from runner.run_dir import slurm_job
from runner.sweep.task import Task

PREEMPT_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"
LOOK_SECONDS = 0.5


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
                code = self._alone(number, overrides)
            elif place.rank > 0:
                code = launcher.follow(place)
                code = DONE if code == STOPPED else code
            else:
                code = self._leading(number, overrides)
            if code == STOPPED:
                self._queue_again(warned.is_set())
        if code != DONE:
            worker.end_process(code)

    def _alone(self, number: int, overrides: list[str]) -> int:
        with self.task.in_launcher_process(number):
            return self.task.attempt(number, overrides)

    def _leading(self, number: int, overrides: list[str]) -> int:
        with self.task.noted(number):
            code = self.task.attempt(number, overrides)
        if code == DONE:  # perhaps it was complete before
            launcher.release_followers()
        return code

    def _queue_again(self, is_warned: bool) -> None:
        """Queue the job again after a stop, unless Slurm does, or the command ends the sweep."""
        if self.task.is_stopped:
            return
        try:
            if slurm_job.field("JobState") != slurm_job.RUNNING:  # Slurm ends it
                return
            is_preempted = slurm_job.field("PreemptTime") not in ("", "None")
            restarts = int(env.read("SLURM_RESTART_COUNT") or 0)
            if is_warned and not is_preempted and restarts >= self.max_num_timeout:
                print(
                    f"The time is up, and hydra.launcher.max_num_timeout={self.max_num_timeout}: "
                    "the job is not queued again. The same command goes on with it.",
                    flush=True,
                )
                return
            print("The state is saved; the job is queued again.", flush=True)
            slurm_job.requeue()
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
