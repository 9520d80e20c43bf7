"""One process of a job that ``runner submit`` has handed to Slurm; srun starts it.

Rank 0 locks the run and trains it to its end; the others join it. A run that was stopped ends with
0, and rank 0 says so in a file: srun would take any other code of one process for a failure, and
end the others. While nothing is trained, stop signals have their default effect. Free of torch
until the run is trained.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from accel.machine import env
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures, launcher, start_run, worker
from runner.recipe import processes
from runner.runs import directory, lock, numerics, outcomes, sessions
from runner.runs.job import Job
from runner.training.stopping import STOP_SIGNALS

# A node that has lost power keeps its lock until the file server's lease ends.
LOCK_SECONDS = 300.0
LOOK_SECONDS = 2.0
JOB_ID = "SLURM_JOB_ID"
TOO_SHORT = (
    "The time limit of the job left no time for a single step: it is not queued again. Give a "
    "longer submit.time."
)


def main() -> None:
    """Train the job whose session is the program's argument, as one of its processes; exit."""
    try:
        with numerics.sleeping_when_idle():
            code = _train(Path(sys.argv[1]))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (Exception, SystemExit) as error:  # with SystemExit(0) it would look complete
        code = failures.report(error)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # there is nothing left to stop
    worker.end_process(code)


def _train(folder: Path) -> int:
    place = processes.adopted()
    if place is not None and place.rank > 0:
        code = launcher.follow(place)
        return DONE if code == STOPPED else code
    run_dir = sessions.run_dir_of(folder)
    before = directory.newest_checkpoint(run_dir)
    code = _lead(folder, run_dir)
    if code != STOPPED:
        return code
    if directory.newest_checkpoint(run_dir) == before and _time_was_up(run_dir):
        print(TOO_SHORT, file=sys.stderr, flush=True)
        return FAILED
    stopped_file(run_dir).touch()
    return DONE


def stopped_file(run_dir: Path) -> Path:
    """Return the file that says that this job's processes were stopped with the state saved."""
    return outcomes.log_folder(run_dir) / f"slurm-{env.read(JOB_ID)}.stopped"


def _lead(folder: Path, run_dir: Path) -> int:
    """Train the run as rank 0, once no other command holds its lock."""
    job, recipe = Job.load(folder)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with lock.held(run_dir):
                return start_run.continue_in(
                    run_dir,
                    recipe,
                    job.overrides,
                    job.config_name,
                    log_levels=job.log_levels,
                    may_change=True,
                )
        except lock.HeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)


def _time_was_up(run_dir: Path) -> bool:
    """Return whether the signal before the time limit has stopped the run."""
    return str(sessions.summary(run_dir).get("reason")).startswith(signal.SIGUSR1.name)
