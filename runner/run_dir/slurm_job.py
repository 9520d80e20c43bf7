"""The Slurm job that a run was handed to: `slurm.json` in its directory. Free of torch."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import time
from pathlib import Path

from runner.run_dir.json_files import Fields, write_json

FILE = "slurm.json"
SCRIPT = "submit.sh"


def write(run_dir: Path, job_id: str) -> None:
    """Note the job that trains a run."""
    found = {"job": job_id, "time": time.time(), "host": platform.node()}
    write_json(run_dir / FILE, found)


def read(run_dir: Path) -> Fields:
    """Return what `write` has noted; empty: the run was not submitted."""
    try:
        found = json.loads((run_dir / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def queued(job_id: str) -> str:
    """Return the state of a job that is queued or runs; empty: it is neither, or unknown."""
    if shutil.which("squeue") is None:
        return ""
    command = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else ""
