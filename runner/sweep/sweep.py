"""A sweep: a folder of runs and a list of overrides, which the same command finds again.

``<output_dir>/<name>/sweep-<time>-<digest>/`` holds `sweep.json` (written before the first job, and
never changed) and a run directory for each job, named by its number with four digits. A job's state
is that of its run. The digest is that of the command: the config's name and the overrides, without
those that only say where jobs run. Free of torch.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError, Problem
from runner.recipe import hydra_setup, paths, plugins, serialization
from runner.recipe.composition import Examined
from runner.recipe.schema import Recipe
from runner.runs import directory as run_directory
from runner.runs import lock
from runner.runs.directory import SWEEPS
from runner.runs.json_files import SWEEP, writable
from runner.runs.record import RunRecord

Plain = Mapping[str, Any]  # a recipe as plain containers
# How long another command may take to write `sweep.json`, or to choose jobs.
WAIT_SECONDS = 30.0
MOST_DIFFERENCES = 12
# Interpolations whose values are not in the files of a recipe; facts are the data's, in a job.
RESOLVER = re.compile(rb"\$\{(?!facts:)[^}]*:")


@dataclass(frozen=True)
class Job:
    """A job that is known before the sweep begins.

    `changes` are the nodes of its recipe that differ from the sweep's.
    """

    overrides: tuple[str, ...]
    changes: Plain


@dataclass(frozen=True)
class Description:
    """The content of `sweep.json`.

    Args:
        command: the command line that began the sweep.
        config_name: the primary file of the recipes.
        overrides: of the command, without those of where jobs run.
        digest: of the command, as in the directory's name.
        sources: digest of all that recipes are composed from; None: it is not known.
        time: seconds since the epoch.
        recipe: the first job's frozen recipe.
        jobs: the jobs that are known in advance; empty: the sweeper chooses them.
        search: `hydra.sweeper` of a search, without what may change; empty: it is none.
    """

    command: list[str]
    config_name: str
    overrides: list[str]
    digest: str
    sources: str | None
    time: float
    recipe: Plain
    jobs: list[Job]
    search: Plain = field(default_factory=dict)

    def is_of(self, sources: str, lists: Sequence[Sequence[str]]) -> bool:
        """Return whether composing jobs from such sources would yield the same recipes again."""
        return self.sources == sources and [list(one.overrides) for one in self.jobs] == [*lists]

    def plain(self, number: int) -> dict[str, Any]:
        """Return the recipe of a job that is known in advance, as composed."""
        return {**self.recipe, **self.jobs[number].changes}

    def searched(self) -> dict[str, Any]:
        """Return the recipe of a search, and its settings under their own key."""
        return {**self.recipe, plugins.SWEEPER: self.search}


@dataclass(frozen=True)
class Sweep:
    """A sweep directory and its description."""

    path: Path
    description: Description

    def run_dir(self, number: int) -> Path:
        """Return the run directory of a job, which may not exist yet."""
        return job_dir(self.path, number)

    def started(self) -> list[int]:
        """Return the numbers of the jobs that have a run directory."""
        return sorted(int(path.name) for path in self.path.glob("[0-9]*") if path.name.isdigit())

    def pending(self) -> tuple[int, ...]:
        """Return the jobs, of those that are known in advance, whose runs are not finished."""
        known = range(len(self.description.jobs))
        return tuple(number for number in known if not RunRecord(self.run_dir(number)).is_done)

    def recipe(self, number: int) -> Recipe:
        """Return the recipe of a job that is known in advance, as composed."""
        return serialization.from_plain(self.description.plain(number))

    def examined(self) -> list[Examined]:
        """Return the jobs that are known in advance and not finished, as composed."""
        there = self.description
        return [
            Examined(self.recipe(number), [], there.jobs[number].overrides, there.config_name)
            for number in self.pending()
        ]


def known_job(overrides: Sequence[str], recipe: Plain, base: Plain) -> Job:
    """Return the entry of a job, whose recipe is frozen as plain containers."""
    same = {key for key in recipe if _text(base[key]) == _text(recipe[key])}
    return Job(tuple(overrides), {k: value for k, value in recipe.items() if k not in same})


def job_dir(folder: Path, number: int) -> Path:
    """Return the run directory of a job of the sweep in a folder."""
    return folder / f"{number:04}"


# -- recipes -------------------------------------------------------------------------------


def sources(overrides: Sequence[str]) -> str | None:
    """Return a digest of all that recipes are composed from, inside a Hydra session.

    None: values come from elsewhere than files, too.
    """
    if hydra_setup.packages() or any("${" in override for override in overrides):
        return None
    found = hashlib.sha256(str(paths.conf_folder()).encode())
    for _, path in hydra_setup.files():
        content = path.read_bytes()
        if RESOLVER.search(content):
            return None
        found.update(f"{path}\0".encode(errors="replace") + content + b"\0")
    for package in ("hydra-core", "omegaconf", "accel-runner"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # in its checkout
            found.update(importlib.metadata.version(package).encode())
    return found.hexdigest()


# -- on disk -------------------------------------------------------------------------------


def _packed(value: Any) -> Any:
    """Return plain containers as JSON can hold them: other keys than texts stand in pairs."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _packed(one) for key, one in value.items()}
        return {"": [[key, _packed(one)] for key, one in value.items()]}
    return list(map(_packed, value)) if isinstance(value, list | tuple) else value


def _unpacked(found: dict[str, Any]) -> dict[Any, Any]:
    return dict(found[""]) if found.keys() == {""} else found


def _text(value: Any) -> str:
    return json.dumps(_packed(value), ensure_ascii=False)


def read(path: Path) -> Sweep:
    """Return the sweep in a directory.

    Raises:
        ConfigError: if it is none, or its description is damaged.
    """
    file = path / SWEEP
    try:
        content = json.loads(file.read_bytes(), object_hook=_unpacked)
        content["jobs"] = [Job(tuple(one["overrides"]), one["changes"]) for one in content["jobs"]]
        return Sweep(path.absolute(), Description(**content))
    except FileNotFoundError as error:
        rule, remedy = f"a sweep directory holds a {SWEEP}", "Name another directory."
        raise ConfigError.of(str(path), rule, remedy) from error
    except (ValueError, TypeError, KeyError) as error:
        rule = f"it is damaged, or of another version of the runner ({error})"
        raise ConfigError.of(str(file), rule, "Start a new sweep with sweep.dir=….") from error


def find(chosen: str | None, recipe: Recipe, digest: str) -> Sweep | None:
    """Return the sweep that a command continues; None: it begins one.

    `chosen` is ``sweep.dir``, `recipe` the first job's.

    Raises:
        ConfigError: if the chosen directory holds a run, or another sweep.
    """
    if chosen is None:
        folder = _folder(recipe)
        found = folder.parent.glob(f"{glob.escape(folder.name)}/{SWEEPS}*-{digest}/{SWEEP}")
        newest = max((one.parent for one in found), key=lambda place: place.name, default=None)
        return None if newest is None else read(newest)
    path = Path(chosen).expanduser().absolute()
    if not (path / SWEEP).exists():
        if run_directory.is_run(path):
            rule, remedy = "the directory holds a run", "Name another directory."
            raise ConfigError.of(f"sweep.dir={chosen}", rule, remedy)
        return None
    sweep = read(path)
    if sweep.description.digest != digest:
        rule = f"the directory holds another sweep ({' '.join(sweep.description.overrides)})"
        remedy = "Name another directory, or repeat that command."
        raise ConfigError.of(f"sweep.dir={chosen}", rule, remedy)
    return sweep


def _folder(recipe: Recipe) -> Path:
    return Path(recipe.output_dir).expanduser().absolute() / recipe.name


def create(chosen: str | None, recipe: Recipe, description: Description) -> Sweep:
    """Create the directory of a sweep, or return that of a command that has just done so.

    Raises:
        ConfigError: if it cannot be written.
    """
    path = _folder(recipe) / f"{SWEEPS}{run_directory.stamp()}-{description.digest}"
    if chosen is not None:
        path = Path(chosen).expanduser().absolute()
    with writable(str(path), "Give sweep.dir=<a folder you may write to>."):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock.held(path.parent, WAIT_SECONDS):
            found = find(chosen, recipe, description.digest)
            if found is None:
                path.mkdir(exist_ok=True)
                content = f"{_text(asdict(description))}\n".encode(errors="surrogateescape")
                checkpoints.write_atomically(path / SWEEP, content)
            return found or read(path)


def discard(sweep: Sweep) -> None:
    """Remove a sweep that was refused, and its folder if nothing else lies there."""
    folder = sweep.path.parent
    shutil.rmtree(sweep.path, ignore_errors=True)
    if [one.name for one in folder.iterdir()] == [lock.FILE]:
        (folder / lock.FILE).unlink()
        folder.rmdir()


# -- the same command again ----------------------------------------------------------------


def require_unchanged(there: Sweep, here: Description) -> None:
    """Refuse to continue a sweep whose recipes have changed since it was begun.

    Raises:
        ConfigError: naming each key that differs, with the jobs that it differs in.
    """
    old, new, shown = there.description, here, str(there.path)
    remedy = "Undo the change, or begin a new sweep with sweep.dir=<a new directory>."
    numbers = range(max(len(old.jobs), len(new.jobs)))
    changed: dict[tuple[str, str], list[int]] = {
        (_job(new, n), _job(old, n)): [] for n in numbers if _job(old, n) != _job(new, n)
    }
    if not changed:
        pairs = [(old.plain(number), new.plain(number)) for number in numbers]
        for number, pair in enumerate(pairs or [(old.searched(), new.searched())]):
            for key, before, after in serialization.differences(*pair):
                jobs = changed.setdefault((f"{key}={after}", f"{key}={before}"), [])
                jobs += [number] if pairs else []
    ConfigError.raise_if(
        [
            Problem(f"{after}{_in_jobs(jobs)}", f"{shown} has {before}", remedy)
            for (after, before), jobs in list(changed.items())[:MOST_DIFFERENCES]
        ]
    )


def _job(of: Description, number: int) -> str:
    if number >= len(of.jobs):
        return f"no job {number}"
    return f"job {number} ({' '.join(of.jobs[number].overrides) or 'without overrides'})"


def _in_jobs(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f" in job{'s' if len(numbers) > 1 else ''} {shown}{more}" if numbers else ""
