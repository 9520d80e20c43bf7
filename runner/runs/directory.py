"""The directory of a run: claimed once, described, found again. Imports no torch by itself."""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import secrets
import shlex
import shutil
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import AccelError, ConfigError, Problem
from runner.exit_codes import REFUSED
from runner.recipe import trust
from runner.recipe.composition import Frozen
from runner.recipe.schema import InitFrom, Recipe
from runner.runs import json_files, lock, sessions
from runner.runs.job import Job
from runner.runs.sessions import CONFIG, JOB

logger = logging.getLogger(__name__)

LOGS, RUN_LOG = "logs", "run.log"
# A sweep's folder lies beside runs: ``sweep-<time>-<digest>``.
SWEEPS = "sweep-"
REQUEST = "request.json"  # what processes of an evaluation are asked for
ARTIFACTS = "artifacts"  # what belongs to the trained model beside its weights
WEIGHTS = ("model", "pytorch_model")  # in names of files of a checkpoint
OTHER = "Name another folder."
MOST_NAMED = 4  # entries of a directory that is refused
# What a run writes before its first step.
BEFORE_TRAINING = (sessions.FOLDER, lock.FILE, LOGS, RUN_LOG, "tensorboard", checkpoints.FOLDER)
SHELL_LOGS = (".log", ".out", ".err", ".txt")  # of the scheduler that runs the command


class UsedError(ConfigError):
    """The directory that a new run should have holds something else."""


def claim(output_dir: str | os.PathLike[str], name: str) -> Path:
    """Create and return a directory that no other run has: ``<output_dir>/<name>/<time>-<id>``.

    Raises:
        ConfigError: if the name is no single folder name, or the place cannot be written.
    """
    if name in ("", ".", "..") or Path(name).name != name:
        rule = "it is the name of one folder"
        raise ConfigError.of(f"name={name!r}", rule, "Use letters, digits, '-' and '_'.")
    folder = Path(output_dir).expanduser().absolute() / name
    remedy = "Give output_dir=<a folder you may write to>."
    with json_files.writable(f"output_dir={str(output_dir)!r}", remedy):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = folder / f"{stamp()}-{secrets.token_hex(2)}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path


def claim_chosen(run_dir: str | os.PathLike[str]) -> Path:
    """Create the directory that a person has chosen for a new run, and return its absolute path.

    Raises:
        ConfigError: if it holds anything, is no directory, or cannot be written.
    """
    path = Path(run_dir).expanduser().absolute()
    require_unused(path)
    with json_files.writable(f"run_dir={str(run_dir)!r}", OTHER):
        path.mkdir(parents=True, exist_ok=True)
    return path


def require_unused(path: Path) -> None:
    """Raise a UsedError if a directory that is to be a new run's holds anything.

    Tries at a run that made no step do not count, nor do logs of the shell or the scheduler that
    runs the command.

    Raises:
        ConfigError: also if the directory cannot be read.
    """
    value = f"run_dir={str(path)!r}"
    with json_files.writable(value, OTHER):
        try:
            present = sorted(one.name for one in path.iterdir() if not _is_of_a_try(one))
        except (FileNotFoundError, NotADirectoryError):
            return  # claiming it says what is wrong
    if sessions.begun(path) or sessions.is_submitted(path):
        remedy = f"Resume it with resume={shlex.quote(str(path))}, or name another directory."
        raise UsedError.of(value, "the directory holds another run", remedy)
    if present:
        more = f" and {len(present) - MOST_NAMED} more" if len(present) > MOST_NAMED else ""
        rule = (
            f"a new run needs an empty directory; it holds {', '.join(present[:MOST_NAMED])}{more}"
        )
        remedy = f"Name another directory, such as run_dir={shlex.quote(str(path / 'run'))}."
        raise UsedError.of(value, rule, remedy)


def _is_of_a_try(path: Path) -> bool:
    """Return whether a command has such a file in a run directory before the first step."""
    if path.name == checkpoints.FOLDER:
        return not any(path.iterdir())
    return (
        path.name in BEFORE_TRAINING
        or (path.name.startswith(".") and ".partial-" in path.name)
        or path.suffix in SHELL_LOGS
    )


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run."""
    return sessions.current(path) is not None


def stamp() -> str:
    """Return the time as names of directories have it."""
    return f"{datetime.now():%Y%m%d-%H%M%S}"


def claimed(output_dir: str | os.PathLike[str], name: str) -> list[Path]:
    """Return all directories of runs called `name`, oldest first."""
    folder = Path(output_dir).expanduser().absolute() / name
    found = folder.iterdir() if folder.is_dir() else iter(())
    runs = (path for path in found if path.name[0] != "." and not path.name.startswith(SWEEPS))
    return sorted((path for path in runs if path.is_dir()), key=_sort_key)


def _sort_key(run_dir: Path) -> tuple[str, int]:
    # Runs claimed within one second differ in the time at which their recipe was written.
    stamp, first = run_dir.name.rpartition("-")[0], next(iter(sessions.of_run(run_dir)), None)
    return stamp, 0 if first is None else (first / JOB).stat().st_mtime_ns


def is_request(path: Path) -> bool:
    """Return whether a folder is that of the processes of an evaluation: it holds no run."""
    return (path / REQUEST).is_file()


def problems(recipe: Recipe) -> list[Problem]:
    """Return what is wrong with the directory and the weights that are chosen for a new run."""
    try:
        if recipe.run_dir is not None and recipe.resume is None:
            require_unused(Path(recipe.run_dir).expanduser().absolute())
        if recipe.init_from is not None and recipe.resume is None:
            path = InitFrom.of(recipe.init_from).path
            if not Path(path).expanduser().exists():
                rule = "there is no such run, checkpoint or file"
                raise ConfigError.of(f"init_from={path}", rule, "Name one that exists.")
    except ConfigError as error:
        return list(error.problems)
    return []


def frozen(run_dir: str | os.PathLike[str]) -> Frozen:
    """Return the recorded recipe of a run, from which another one is composed.

    Raises:
        ConfigError: if it is no run directory.
    """
    origin = fingerprint(Path(run_dir))
    job, plain = Job.read(Path(run_dir))
    return Frozen(plain, tuple(job.overrides), job.config_name, job.cwd, origin)


def fingerprint(run_dir: Path) -> str:
    """Return the name of the session from which a resume composes its recipe."""
    folder = sessions.current(run_dir)
    return "" if folder is None else folder.name


def states_root(job: Job, project_dir: str | None) -> Path:
    """Return the folder that a run's `checkpoints` lie in.

    It is the run directory or, below a folder that the recipe names, one of the run's own.
    """
    if project_dir is None:
        return job.run_dir
    # A relative folder is seen from where the run was started.
    return Path(job.cwd, project_dir, job.states)


def checkpoint_folder(run_dir: str | os.PathLike[str]) -> Path:
    """Return where a run's checkpoints lie.

    Raises:
        ConfigError: if it is no run directory.
    """
    job, plain = Job.read(Path(run_dir))
    node: Any = plain
    for key in ("checkpoint", "project"):
        node = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping):
        rule = f"its {CONFIG} is no recipe: it has no checkpoint.project"
        raise ConfigError.of(str(run_dir), rule, "Name a folder such as runs/<name>/<time>-<id>.")
    return states_root(job, node.get("project_dir")) / checkpoints.FOLDER


def newest_checkpoint(run_dir: str | os.PathLike[str]) -> Path | None:
    """Return a run's newest complete checkpoint; broken ones are named and skipped."""
    return checkpoints.newest_complete(checkpoint_folder(run_dir))


def own_checkpoints(run_dir: Path) -> list[Path]:
    """Return a run's checkpoints, complete or not; without a recipe those in its directory."""
    try:
        folder = checkpoint_folder(run_dir)
    except ConfigError:
        folder = run_dir / checkpoints.FOLDER
    return checkpoints.checkpoints(folder)


def weights_verdict(old: Path, new: Path) -> str:
    """Return in words whether the newest checkpoints of two runs hold the same weights, bit by bit.

    Empty where they are not of the same step, or one of them has none.
    """
    try:
        found = [newest_checkpoint(run_dir) for run_dir in (old, new)]
        manifests = [checkpoints.read_manifest(path) for path in found if path is not None]
    except AccelError:
        return ""
    if len(manifests) < 2:
        return ""
    steps = [manifest.metadata.get("step") for manifest in manifests]
    if steps[0] != steps[1]:
        return f"weights: not compared, the runs ended at step {steps[0]} and at step {steps[1]}"
    digests = [_weights(manifest) for manifest in manifests]
    if not digests[0] or digests[0].keys() != digests[1].keys():
        return ""
    verdict = "bit-equal to" if digests[0] == digests[1] else "not"
    return f"weights at step {steps[0]}: {verdict} those of {old.parent.name}/{old.name}"


def _weights(manifest: checkpoints.Manifest) -> dict[str, str]:
    return {
        name: entry.sha256 for name, entry in manifest.files.items() if name.startswith(WEIGHTS)
    }


def resume_command(run_dir: str, needed: Iterable[str] | None = None, command: str = "") -> str:
    """Return the command that resumes a run.

    Args:
        run_dir: the run directory, as it is to be written.
        needed: packages that the run needs; None: all that are trusted here.
        command: "submit" for a job of Slurm.
    """
    words = ["runner", *command.split(), f"resume={shlex.quote(run_dir)}", *trust.flags(needed)]
    return " ".join(words)


def existing(run_dir: str | os.PathLike[str], asked_by: str = "") -> Path:
    """Return the absolute path of a run directory that exists.

    `asked_by` is the prefix of the value in an error, e.g. "resume=".

    Raises:
        ConfigError: if it is no run directory.
    """
    path = Path(os.path.abspath(os.path.expanduser(run_dir)))
    if not is_run(path):
        rule = (
            f"a run directory holds {sessions.FOLDER}"
            if path.is_dir()
            else "there is no such directory"
        )
        remedy = "Name a directory such as runs/<name>/<time>-<id>."
        raise ConfigError.of(f"{asked_by}{os.fspath(run_dir)!r}", rule, remedy)
    return path


# -- runs that came to nothing -------------------------------------------------------------


def remove_unstarted(run_dir: Path, code: int, *, with_parents: bool = True) -> None:
    """Remove the directory of a new run that was refused, where nothing is in it but the try.

    Folders above that held nothing else go along, unless a person has chosen the directory. It is
    out of sight at once, so that no other rank writes its outcome there.
    """
    if code != REFUSED or not run_dir.is_dir() or own_checkpoints(run_dir):
        return
    if sessions.begun(run_dir) or any(one.name not in BEFORE_TRAINING for one in run_dir.iterdir()):
        return
    hidden = run_dir.with_name(f".{run_dir.name}.removed-{secrets.token_hex(4)}")
    run_dir.rename(hidden)
    shutil.rmtree(hidden)
    if not with_parents:
        return
    with contextlib.suppress(OSError):  # other runs lie there
        run_dir.parent.rmdir()
        run_dir.parent.parent.rmdir()


def set_aside(run_dir: Path) -> None:
    """Move what a run has measured to its newest session, so that it begins anew.

    Logs are appended to, and incomplete checkpoints are removed. Requires the run's lock.
    """
    shutil.rmtree(run_dir / checkpoints.FOLDER, ignore_errors=True)
    for folder in sessions.of_run(run_dir)[-1:]:
        for name in (json_files.METRICS, json_files.SUMMARY, "tensorboard"):
            if (run_dir / name).exists():
                os.replace(run_dir / name, folder / name)


def keep_artifacts(run_dir: Path, artifacts: Mapping[str, Path]) -> None:
    """Copy files and folders that the trained model needs to a run, unless it has them.

    Args:
        run_dir: the run, whose lock is held.
        artifacts: what is copied to ``artifacts/<name>``, each whole or not at all.
    """
    for name, source in artifacts.items():
        final = run_dir / ARTIFACTS / name
        if final.exists():
            names = [path.name for path in source.glob("*")]
            if any(filecmp.cmpfiles(source, final, names)[1:]):
                logger.warning("%s differs from %s, with which the run began.", source, final)
            continue
        final.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            with checkpoints.new_folder(final) as staged:
                shutil.copytree(source, staged, dirs_exist_ok=True)
        else:
            with checkpoints.replacing(final) as partial:
                shutil.copyfile(source, partial)


def remove_partials(run_dir: Path) -> None:
    """Remove partial files of commands that were killed. Requires the run's lock."""
    for folder in (run_dir, run_dir / checkpoints.FOLDER, *sessions.of_run(run_dir)):
        for path in folder.glob(".*.partial-*"):
            if path.is_file():
                path.unlink()
