"""Versions, machine, code and data: `environment.json`. Imports no torch by itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

from accel.machine import passwords
from accel.machine.env import read
from accel.strategies.table import specs
from runner.recipe import trust
from runner.run_dir import data_files, provenance
from runner.run_dir.json_files import write_json

logger = logging.getLogger(__name__)

PACKAGES = (
    *("accel-runner", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard"),
    *("rich", "scikit-learn", "torchdata"),
    *(name for spec in specs() for name in spec.packages),
)
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "SLURM_JOB_ID")


def write_environment(run_dir: str | os.PathLike[str], data: object = None) -> dict[str, object]:
    """Write `environment.json` and any `git.diff` to a run, or an attempt in it; return it.

    `data` is the recipe's node of the data factory, whose files are noted.
    """
    root = Path(run_dir)
    found = describe(data, root / provenance.DIFF)
    write_json(root / provenance.ENVIRONMENT, found)
    return found


def note_data(run_dir: Path, data: object) -> None:
    """Note the files of the data factory anew, which may have written some of them (a cache)."""
    path, found = run_dir / provenance.ENVIRONMENT, None
    with contextlib.suppress(OSError, ValueError):  # a run without a record, or a damaged one
        found = json.loads(path.read_bytes())
    files = data_files.find(data)
    if isinstance(found, dict) and found.get("data") != files:
        write_json(path, {**found, "data": files})


def describe(data: object = None, diff_to: Path | None = None) -> dict[str, object]:
    """Return versions, machine, code and data of this process; a patch goes to `diff_to`."""
    return {
        "started": time.time(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "command": passwords.shown(sys.orig_argv),  # Hydra is given another line
        "cwd": os.getcwd(),
        "packages": versions(),
        "device": _device(),
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "variables": {name: value for name in VARIABLES if (value := read(name)) is not None},
        "git": provenance.git_state(os.getcwd(), diff_to),
        "runner_git": provenance.runner_checkout(),
        "code": provenance.package_digests(trust.trusted()),
        "data": data_files.find(data),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run depends on, as far as they are installed."""
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


def _cpu() -> str:
    """Return the model of the processor, on which the last bits of sums depend."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
