"""Versions, machine, code and data of a session, and how two differ. Free of torch at import."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from accel.machine import passwords
from accel.machine.env import read
from accel.strategies.table import specs
from runner.recipe import paths, trust
from runner.runs import provenance, sessions
from runner.runs.json_files import Fields, JsonObject, read_json
from runner.runs.sessions import CONFIG

logger = logging.getLogger(__name__)

FILE = "environment.json"
PACKAGES = (
    *("accel-runner", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard"),
    *("rich", "scikit-learn", "torchdata"),
    *(name for spec in specs() for name in spec.packages),
)
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "SLURM_JOB_ID")
MACHINE = {"platform": "the platform", "cpu": "the CPU", "device": "the accelerator"}
ABSENT = "not installed"
MOST_FILES = 2_000  # of a folder of data, the rest is not looked at


def describe(data: object = None, diff_to: Path | None = None) -> dict[str, object]:
    """Return versions, machine, code and data of this process; a patch goes to `diff_to`.

    `data` is the recipe's node of the data factory, whose files are noted.
    """
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
        "code": provenance.package_digests(trust.trusted()),
        "data": data_files(data),
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
    return found


def _cpu() -> str:
    """Return the model of the processor, on which the last bits of sums depend."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


# -- data ----------------------------------------------------------------------------------


def data_files(node: object) -> dict[str, JsonObject]:
    """Return path, number of files, bytes and newest change of what a data factory is given.

    By dotted key. Contents are not read; paths that the factory chooses itself are not known.
    """
    return {key: _state(path) for key, path in _paths(node, "data")}


def _paths(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _paths(value, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _paths(value, f"{key}.{number}")
    elif isinstance(node, str) and node and key.rpartition(".")[2] not in ("name", "_target_"):
        path = os.path.expanduser(node)
        with contextlib.suppress(OSError, ValueError):  # a text that is no name of a file
            if os.path.exists(path):
                yield key, os.path.abspath(path)


def _state(path: str) -> JsonObject:
    number, total, newest = 0, 0, 0.0
    for file in [Path(path)] if os.path.isfile(path) else paths.files_below(path):
        if number == MOST_FILES:
            break
        with contextlib.suppress(OSError):
            found = file.stat()
            number, total = number + 1, total + found.st_size
            newest = max(newest, found.st_mtime)
    return {"path": path, "files": number, "bytes": total, "newest": newest}


def described_data(found: Fields) -> str:
    """Return e.g. "2 files of 400 bytes, newest of 2026-01-31 12:00:00"."""
    number = found.get("files")
    newest = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.get("newest") or 0))
    files = f"{number} file{'' if number == 1 else 's'}"
    return f"{files} of {found.get('bytes')} bytes, newest of {newest}"


# -- two environments ----------------------------------------------------------------------


def recorded(run_dir: Path) -> Fields:
    """Return the environment of a run; empty where it is missing or damaged."""
    folder = sessions.current(run_dir)
    return {} if folder is None else read_json(folder / FILE)


def compare(run_dir: Path, then: Fields, now: Fields) -> dict[str, list[str]]:
    """Return by subject how a run's record differs from this process; no sentence: it does not.

    Args:
        run_dir: the run.
        then: its environment; empty where it is missing or damaged.
        now: `describe` of this process.
    """
    found = differences(then, now)
    if not then:
        return found
    found["versions"] += _changes(then, now, MACHINE)
    found["recipe"] = []
    if earlier := earlier_recipes(run_dir):
        names = ", ".join(path.name for path in earlier)
        found["recipe"].append(f"sessions {names} had another recipe")
    if earlier := earlier_environments(run_dir):
        names = ", ".join(path.name for path in earlier)
        found["code"].append(f"sessions {names} had other code, versions or data")
    if then.get("cwd") not in (None, now.get("cwd")):
        found["recipe"].append(f"relative folders were seen from {then['cwd']}")
    return found


def differences(then: Fields, now: Fields) -> dict[str, list[str]]:
    """Return how two recorded environments differ under "code", "versions" and "data"."""
    if not then:
        rule = "is missing or damaged: code, versions and data are not compared"
        return {"code": [f"{FILE} {rule}"]}
    before, after = then.get("packages") or {}, now.get("packages") or {}
    return {
        "code": provenance.code_differences(then, now),
        "versions": [
            f"{name} was {before.get(name, ABSENT)}, and is {after.get(name, ABSENT)}"
            for name in {**before, **after}
            if before.get(name) != after.get(name)
        ]
        + _changes(then, now, {"python": "Python"}),
        "data": data_differences(then, now),
    }


def earlier_recipes(run_dir: Path) -> list[Path]:
    """Return the sessions whose steps were made with another recipe than the next one's."""
    return [
        one
        for one, after in pairwise(sessions.begun(run_dir))
        if (one / CONFIG).read_bytes() != (after / CONFIG).read_bytes()
    ]


def earlier_environments(run_dir: Path) -> list[Path]:
    """Return the sessions whose steps were made with other code, versions or data than the next's.

    Their patches lie beside.
    """
    found = [(one, read_json(one / FILE)) for one in sessions.begun(run_dir)]
    return [
        one for (one, then), (_, now) in pairwise(found) if any(differences(then, now).values())
    ]


def _changes(then: Fields, now: Fields, subjects: Mapping[str, str]) -> list[str]:
    return [
        f"{subject} was {_plain(then[key])}, and is {_plain(now.get(key))}"
        for key, subject in subjects.items()
        if key in then and then[key] != now.get(key)
    ]


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return str(value)


def data_differences(then: Fields, now: Fields, but_for: Iterable[str] = ()) -> list[str]:
    """Return how recorded data files differ, a sentence for each key.

    Files that were not there then are no difference: a factory may write a cache.

    Args:
        then: content of a run's environment.json.
        now: that of another, or of this process.
        but_for: dotted keys that a command has changed; they are not compared.
    """
    before, after = then.get("data") or {}, now.get("data") or {}
    lines = []
    for key, old in before.items():
        new, given = after.get(key), any(f"{key}.".startswith(f"{one}.") for one in but_for)
        if given:
            continue
        if new is None:
            lines.append(f"{key}: {old.get('path')} is not there")
        elif any(old.get(name) != new.get(name) for name in ("files", "bytes", "newest")):
            lines.append(f"{key}: {described_data(old)} then, {described_data(new)} now")
    return lines
