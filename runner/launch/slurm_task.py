"""One process of a job that ``runner submit`` has handed to Slurm; srun starts it.

Rank 0 locks the run and trains it to its end; the others join it. A run that was stopped ends with
0, and rank 0 says so in a file: srun would take any other code of one process for a failure, and
end the others. While nothing is trained, stop signals have their default effect. Free of torch
until the run is trained.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from accel.machine import env
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures, launcher, start_run, worker
from runner.recipe import processes
from runner.run_dir import atomic_update, directory, lock, numerics, outcomes
from runner.run_dir.job import Job
from runner.run_dir.json_files import SUMMARY
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
    """Train the run whose directory is the program's argument, as one of its processes; exit."""
    run_dir = Path(sys.argv[1])
    try:
        with numerics.sleeping_when_idle():
            code = _train(run_dir)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (Exception, SystemExit) as error:  # with SystemExit(0) it would look complete
        code = failures.report(error)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # there is nothing left to stop
    worker.end_process(code)


def _train(run_dir: Path) -> int:
    place = processes.adopted()
    if place is not None and place.rank > 0:
        code = launcher.follow(place)
        return DONE if code == STOPPED else code
    before = directory.newest_checkpoint(run_dir)
    code = _lead(run_dir)
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


def _lead(run_dir: Path) -> int:
    """Train the run as rank 0, once no other command holds its lock."""
    job, recipe = Job.load(run_dir)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with lock.held(run_dir):
                return start_run.continue_in(
                    run_dir, recipe, job.overrides, job.config_name, log_levels=job.log_levels
                )
        except lock.HeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)


def _time_was_up(run_dir: Path) -> bool:
    """Return whether the signal before the time limit has stopped the run."""
    summary = json.loads(atomic_update.read(run_dir, SUMMARY) or b"{}")
    return str(summary.get("reason")).startswith(signal.SIGUSR1.name)
