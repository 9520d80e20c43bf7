"""The directory of a run: claimed once, described, found again. Imports no torch by itself."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.env import read
from accel.errors import CheckpointError, ConfigError, Problem
from accel.strategies.table import specs
from runner.config import paths
from runner.run_dir import transaction
from runner.run_dir.job import ENVIRONMENT, JOB, Job
from runner.run_dir.transaction import CONFIG

logger = logging.getLogger(__name__)

DIFF = "git.diff"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"

PACKAGES = (
    *("accel-runner", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard"),
    *("rich", "scikit-learn", "torchdata"),
    *(name for spec in specs() for name in spec.packages),
)
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "SLURM_JOB_ID")
GIT_SECONDS = 20.0
MOST_UNTRACKED = 200


# -- claim and find ------------------------------------------------------------------------


def claim(output_dir: str | os.PathLike[str], name: str) -> Path:
    """Create and return a directory that no other run has: ``<output_dir>/<name>/<time>-<id>``.

    Args:
        output_dir: folder of all runs.
        name: name of the run.

    Raises:
        ConfigError: if the name is no single folder name, or the place cannot be written.
    """
    if name in ("", ".", "..") or Path(name).name != name:
        rule = "it is the name of one folder"
        raise ConfigError(Problem(f"name={name!r}", rule, "Use letters, digits, '-' and '_'."))
    folder = Path(output_dir).expanduser().absolute() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = folder / f"{_stamp()}-{secrets.token_hex(2)}"
            if _created(path):
                return path
    except OSError as error:
        rule = f"runs are written there, and that failed ({paths.failure(error)})"
        remedy = "Give output_dir=<a folder you may write to>."
        raise ConfigError(Problem(f"output_dir={str(output_dir)!r}", rule, remedy)) from error


def _stamp() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}"


def _created(path: Path) -> bool:
    try:
        path.mkdir(exist_ok=False)
    except FileExistsError:
        return False
    return True


def claimed(output_dir: str | os.PathLike[str], name: str) -> list[Path]:
    """Return all directories of runs called `name`, oldest first."""
    folder = Path(output_dir).expanduser().absolute() / name
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in found if path.is_dir() and path.name[0] != "."), key=_age)


def _age(run_dir: Path) -> tuple[str, int]:
    # Runs claimed within one second differ in the time at which their config was written.
    stamp, config = run_dir.name.rpartition("-")[0], run_dir / CONFIG
    return stamp, config.stat().st_mtime_ns if config.exists() else 0


def is_run(path: Path) -> bool:
    """Return whether a directory holds the recipe of a run."""
    return any(transaction.read(path, name) is not None for name in (CONFIG, JOB))


def fingerprint(run_dir: Path) -> bytes:
    """Return what the files hold that a resume composes its recipe from."""
    return b"\0".join(transaction.read(run_dir, name) or b"" for name in (CONFIG, JOB))


def find_newest(output_dir: str | os.PathLike[str], name: str) -> Path | None:
    """Return the directory of the newest run called `name`; None if there is none."""
    return next(filter(is_run, reversed(claimed(output_dir, name))), None)


def checkpoint_folder(run_dir: str | os.PathLike[str]) -> Path:
    """Return where a run's checkpoints lie: in the run directory, or where its recipe says.

    Raises:
        ConfigError: if it is no run directory.
    """
    job, plain = Job.read(Path(run_dir))
    node: Any = plain["checkpoint"]
    elsewhere = node["project"]["project_dir"]
    # A relative folder is seen from where the run was started.
    root = job.run_dir if elsewhere is None else Path(job.cwd) / elsewhere
    return root / checkpoints.FOLDER


def newest_checkpoint(run_dir: str | os.PathLike[str]) -> Path | None:
    """Return a run's newest complete checkpoint; broken ones are named and passed over."""
    return checkpoints.newest_complete(checkpoint_folder(run_dir), owner(Path(run_dir)))


def own_checkpoints(run_dir: Path) -> list[Path]:
    """Return a run's checkpoints, complete or not; without a recipe those in its directory."""
    try:
        folder = checkpoint_folder(run_dir)
    except ConfigError:
        folder = run_dir / checkpoints.FOLDER
    return list(filter(owner(run_dir), checkpoints.checkpoints(folder)))


def owner(run_dir: Path) -> Callable[[Path], bool]:
    """Return what tells whether a checkpoint is one of a run.

    What lies in the run directory is. Elsewhere those of other runs may lie in the same folder: a
    checkpoint says which run has written it (those of early versions, and broken ones, do not).
    """
    inside, names = os.path.realpath(run_dir), _names(run_dir)

    def owns(path: Path) -> bool:
        return Path(os.path.realpath(path)).is_relative_to(inside) or run_of(path) in names

    return owns


def run_of(path: Path) -> str | None:
    """Return the name of the run that has written a checkpoint; None: it does not say."""
    try:
        found = checkpoints.read_manifest(path).metadata.get("run")
    except CheckpointError:
        return None
    return None if found is None else str(found)


def _names(run_dir: Path) -> set[str | None]:
    """Return what a run is called: as its directory is, and was when it was started."""
    try:
        recorded = Path(json.loads(transaction.read(run_dir, JOB) or b"{}")["run_dir"]).name
    except (ValueError, KeyError, TypeError):
        recorded = run_dir.name
    return {None, run_dir.name, recorded}


def existing(run_dir: str | os.PathLike[str], asked_by: str = "") -> Path:
    """Return the absolute path of a run directory that exists.

    Args:
        run_dir: where it should be.
        asked_by: what an error puts before the value, e.g. "resume=".

    Raises:
        ConfigError: if it is no run directory.
    """
    path = Path(os.path.abspath(os.path.expanduser(run_dir)))
    if not is_run(path):
        rule = (
            f"a run directory holds a {CONFIG}" if path.is_dir() else "there is no such directory"
        )
        remedy = "Name a directory such as runs/<name>/<time>-<id>."
        raise ConfigError(Problem(f"{asked_by}{os.fspath(run_dir)!r}", rule, remedy))
    return path


# -- what a run leaves ---------------------------------------------------------------------


def write_environment(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Write `environment.json` (versions, machine, device, git) and, if there is one, `git.diff`.

    Args:
        run_dir: the run directory, or an attempt in it.

    Returns:
        What was written.
    """
    root = Path(run_dir)
    found = {
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


def _device() -> dict[str, Any]:
    """Return the machine's accelerator; asks no driver for more than how many there are."""
    import torch

    if not torch.accelerator.is_available():
        return {"type": "cpu", "count": 1}
    kind = torch.accelerator.current_accelerator()
    found: dict[str, Any] = {
        "type": "cpu" if kind is None else kind.type,
        "count": torch.accelerator.device_count(),
    }
    if found["type"] == "cuda":
        found["cuda"] = torch.version.cuda
        # Asking for names would make a context on the device in a process that may not need one.
        if torch.cuda.is_initialized():
            found["names"] = [torch.cuda.get_device_name(i) for i in range(found["count"])]
    return found


def _git(run_dir: Path) -> dict[str, Any] | None:
    """Return where the working directory stands in git, and write what is not committed."""
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
    """Return what git prints, or None where there is no git, no repository or no answer in time."""
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


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write `summary.json` in one piece."""
    write_json(Path(run_dir) / SUMMARY, summary)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON in one piece; numbers that JSON does not know become strings."""
    text = json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False)
    checkpoints.write_atomically(path, f"{text}\n".encode("utf-8", errors="replace"))


class MetricsFile:
    """Appends to a run's `metrics.jsonl`, one JSON object a line, flushed at once.

    Numbers that JSON does not know are strings: "NaN", "Infinity", "-Infinity".

    Args:
        run_dir: the run directory.
        step: the optimizer step that the run goes on from. Lines of later steps are removed, since
            these steps are made again, and so are the test at the end and a last line that was cut
            off. None: from the beginning.
    """

    def __init__(self, run_dir: str | os.PathLike[str], step: int | None = None) -> None:
        self.path = Path(run_dir) / METRICS
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if step is not None and _belongs(line, step)]
            checkpoints.write_atomically(self.path, "".join(f"{line}\n" for line in kept).encode())
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; calling it twice is fine."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _belongs(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
        return int(record["step"]) <= step and record.get("split") != "test"
    except (ValueError, KeyError, TypeError):
        logger.warning("Removing a line of %s that was cut off: %s", METRICS, line[:80])
        return False


def finite(value: Any) -> Any:
    """Return `value` in types that JSON knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value
