"""Jobs of Slurm: this process's own, and the queue. Free of torch.

Source: https://slurm.schedmd.com/squeue.html; https://slurm.schedmd.com/scontrol.html
"""

from __future__ import annotations

import subprocess

from accel.machine import env
from accel.machine.errors import StateError

SCRIPT = "submit.sh"
RUNNING, PENDING = "RUNNING", "PENDING"


def queue() -> dict[str, str]:
    """Return the states of this user's jobs that are queued or run; elements of arrays apart.

    Raises:
        StateError: if Slurm does not answer.
    """
    shown = _ask("squeue", "--me", "--noheader", "--array", "--format=%i %T")
    return dict((line.split()[0], line.split()[1]) for line in shown.splitlines() if line.strip())


def field(name: str) -> str:
    """Return a field of the job that this process runs in, e.g. JobState; StateError: unknown."""
    job_id = env.read("SLURM_JOB_ID") or ""
    shown = _ask("scontrol", "--oneliner", "show", "job", job_id)
    found = (word.partition("=") for word in shown.split())
    return next((value for key, _, value in found if key == name), "")


def requeue() -> None:
    """Queue the job that this process runs in again; it is ended. StateError: it cannot be."""
    _ask("scontrol", "requeue", env.read("SLURM_JOB_ID") or "")


def cancel(*job_ids: str, state: str = "") -> None:
    """End jobs, or those of them that are in a state; StateError: Slurm does not answer."""
    if job_ids:
        _ask("scancel", "--quiet", *([f"--state={state}"] if state else []), *job_ids)


def _ask(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise StateError(f"there is no {command[0]} on this machine") from error
    if answer.returncode != 0:
        raise StateError(f"{' '.join(command)}: {' '.join(answer.stderr.split())}")
    return answer.stdout
