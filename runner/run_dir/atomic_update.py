"""The files that describe a run, changed all together or not at all. Free of torch.

They are `config.yaml`, `overrides.yaml`, `job.json`, `threads.json`, `environment.json` and
`git.diff`: the files that a resume reads and replaces. For a finished run also `summary.json`,
which then says that the run is not complete any more.

- A command writes its own into ``<run_dir>/.attempt-<token>/``. Workers read their job there, and
  the run is unchanged: a command that fails to load the state leaves nothing but its log.
- `commit` (called once the state is loaded and the first step is made) flushes them, keeps the
  earlier recipe as ``config.<n>.yaml``, the environment of other code, versions or data as
  ``environment.<n>.json`` with ``git.<n>.diff``, and renames the folder to ``.committed``. From
  that moment on they describe the run: every reader looks there first. Then they move into their
  places.
- If it is killed in between, the next command that locks the run finishes the move (`recover`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from runner.run_dir import environment, json_files, provenance

CONFIG = "config.yaml"
PREFIX = ".attempt-"
COMMITTED = ".committed"
_RECIPE, _ENVIRONMENT = re.compile(r"config\.(\d+)\.yaml"), re.compile(r"environment\.(\d+)\.json")


def run_dir_of(folder: Path) -> Path:
    """Return the run directory of a folder with a job: itself, or the one an attempt lies in."""
    return folder.parent if folder.name.startswith(PREFIX) else folder


def read(run_dir: Path, name: str) -> bytes | None:
    """Return the content of a file that describes a run, or an attempt in it; None without it."""
    for place in (run_dir / COMMITTED / name, run_dir / name):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return place.read_bytes()
    return None


def stage(run_dir: Path) -> Path:
    """Create and return the folder for the files of one command."""
    folder = run_dir / f"{PREFIX}{secrets.token_hex(4)}"
    folder.mkdir()
    return folder


def commit(folder: Path) -> None:
    """Make the files of an attempt those of the run."""
    run_dir = folder.parent
    for file in folder.iterdir():
        checkpoints.flush_file(file)
    checkpoints.flush_directory(folder)
    _finish(run_dir)
    _keep_recipe(run_dir, folder / CONFIG)
    _keep_environment(run_dir, folder / environment.FILE)
    os.rename(folder, run_dir / COMMITTED)
    checkpoints.flush_directory(run_dir)
    _finish(run_dir)


def discard(folder: Path) -> None:
    """Remove an attempt that has not been committed; for a committed one, do nothing."""
    shutil.rmtree(folder, ignore_errors=True)


def recover(run_dir: Path) -> None:
    """Finish or remove the attempts of commands that were killed. Requires the run's lock."""
    _finish(run_dir)
    for folder in run_dir.glob(f"{PREFIX}*"):
        shutil.rmtree(folder)
    for partial in _partials(run_dir):
        partial.unlink(missing_ok=True)


def kept_recipes(run_dir: Path) -> list[Path]:
    """Return the earlier recipes of a run, ``config.<n>.yaml``, oldest first."""
    return [path for _, path in _kept(run_dir, _RECIPE)]


def kept_environments(run_dir: Path) -> list[Path]:
    """Return the environments of earlier sessions, ``environment.<n>.json``, oldest first."""
    return [path for _, path in _kept(run_dir, _ENVIRONMENT)]


def _kept(run_dir: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    found = ((pattern.fullmatch(path.name), path) for path in run_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def _finish(run_dir: Path) -> None:
    committed = run_dir / COMMITTED
    if not committed.is_dir():
        return
    names = {file.name for file in committed.iterdir()}
    if environment.FILE in names and provenance.DIFF not in names:  # the work tree is clean
        (run_dir / provenance.DIFF).unlink(missing_ok=True)
    for file in sorted(committed.iterdir()):
        os.replace(file, run_dir / file.name)
    checkpoints.flush_directory(run_dir)
    committed.rmdir()


def _keep_recipe(run_dir: Path, new: Path) -> None:
    """Give the run's recipe a second name, unless the new one is the same."""
    current = run_dir / CONFIG
    if current.exists() and current.read_bytes() != new.read_bytes():
        number = _unkept(run_dir, current, _RECIPE)
        if number:
            _second_name(current, f"config.{number:04}.yaml")


def _keep_environment(run_dir: Path, new: Path) -> None:
    """Give the run's environment and patch second names if steps were made by another."""
    current, trained = run_dir / environment.FILE, (run_dir / json_files.METRICS).exists()
    then, now = json_files.read_json(current), json_files.read_json(new)
    if not (trained and then and now and any(environment.differences(then, now).values())):
        return
    number = _unkept(run_dir, current, _ENVIRONMENT)
    if not number:
        return
    patch = run_dir / provenance.DIFF
    if patch.exists():
        _second_name(patch, f"git.{number:04}.diff")
    _second_name(current, f"environment.{number:04}.json")


def _unkept(run_dir: Path, current: Path, pattern: re.Pattern[str]) -> int:
    """Return the number for a file's second name; 0: a commit that was killed has given it one."""
    number, last = max(_kept(run_dir, pattern), default=(0, None))
    return 0 if last and last.read_bytes() == current.read_bytes() else number + 1


def _second_name(path: Path, name: str) -> None:
    target = path.with_name(name)
    target.unlink(missing_ok=True)  # of a commit that was killed
    try:
        os.link(path, target)
    except OSError:  # a file system without hard links
        checkpoints.write_atomically(target, path.read_bytes())


def _partials(run_dir: Path) -> Iterator[Path]:
    """Yield partial files of `checkpoints.write_atomically` calls that were killed."""
    for folder in (run_dir, run_dir / checkpoints.FOLDER):
        yield from (path for path in folder.glob(".*.partial-*") if path.is_file())
