"""Versions, machine, device, git state: `environment.json`. Imports no torch by itself."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from accel.env import read
from accel.strategies.table import specs
from runner.run_dir.job import ENVIRONMENT
from runner.run_dir.json_files import write_json

logger = logging.getLogger(__name__)

DIFF = "git.diff"
PACKAGES = (
    *("accel-runner", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard"),
    *("rich", "scikit-learn", "torchdata"),
    *(name for spec in specs() for name in spec.packages),
)
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "SLURM_JOB_ID")
GIT_SECONDS = 20.0
MOST_UNTRACKED = 200


def write_environment(run_dir: str | os.PathLike[str]) -> dict[str, object]:
    """Write `environment.json` and any `git.diff` to a run, or an attempt in it; return it."""
    root = Path(run_dir)
    found: dict[str, object] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "command": sys.orig_argv,  # Hydra is given another line
        "cwd": os.getcwd(),
        "packages": _versions(),
        "device": _device(),
        "cpu_count": os.cpu_count(),
        "variables": {name: value for name in VARIABLES if (value := read(name)) is not None},
        "git": _git(root),
    }
    write_json(root / ENVIRONMENT, found)
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            logger.debug("%s is not installed", name)
    return found


def _device() -> dict[str, object]:
    """Return the machine's accelerator; asks no driver for more than how many there are."""
    import torch

    if not torch.accelerator.is_available():
        return {"type": "cpu", "count": 1}
    device, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    kind = "cpu" if device is None else device.type
    found: dict[str, object] = {"type": kind, "count": count}
    if kind == "cuda":
        found["cuda"] = torch.version.cuda
        # Asking for names would make a context on the device in a process that may not need one.
        if torch.cuda.is_initialized():
            found["names"] = [torch.cuda.get_device_name(i) for i in range(count)]
    return found


def _git(run_dir: Path) -> dict[str, object] | None:
    """Return commit and branch of the working directory, and write uncommitted changes."""
    sha = _git_output("rev-parse", "HEAD")
    if sha is None:
        return None
    diff = _git_output("diff", "HEAD", "--binary") or ""
    untracked = (_git_output("ls-files", "--others", "--exclude-standard") or "").splitlines()
    if diff:
        (run_dir / DIFF).write_text(diff, encoding="utf-8", errors="surrogateescape")
    return {
        "sha": sha.strip(),
        "branch": (_git_output("rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "root": (_git_output("rev-parse", "--show-toplevel") or "").strip(),
        "dirty": bool(diff),
        "untracked": untracked[:MOST_UNTRACKED],
        "num_untracked": len(untracked),
    }


def _git_output(*arguments: str) -> str | None:
    """Return the output of git; None without git, a repository or an answer in time."""
    try:
        answer = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            timeout=GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("git %s: %s", " ".join(arguments), error)
        return None
    return answer.stdout.decode("utf-8", errors="surrogateescape")
