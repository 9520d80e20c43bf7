"""The directory of a sweep: found again by the same command, described by `sweep.json`.

``<output_dir>/<name>/sweep-<time>-<digest>/`` holds `sweep.json` (written before the first job, and
never changed) and a run directory for each job, named by its number with four digits. A job's state
is that of its run. The digest is that of the command: the config's name and the overrides, without
those that only say where jobs run. Free of torch.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError, Problem
from runner.recipe import hydra_setup, paths, resumed_recipe, serialization, sweepers
from runner.recipe.schema import Recipe
from runner.runs import directory as run_directory
from runner.runs import lock, sessions
from runner.runs.directory import SWEEP, SWEEPS
from runner.sweep.settings import is_setting

FORMAT = 1
Plain = Mapping[str, Any]  # a recipe as plain containers
# How long another command may take to write `sweep.json`.
CREATE_SECONDS = 30.0
MOST_DIFFERENCES = 12


@dataclass(frozen=True)
class KnownJob:
    """A job that is known before the sweep begins.

    `changes` are the places where its recipe differs from the sweep's, as (path, value), or (path,)
    where it lacks the key; None: JSON cannot hold the recipe, which is composed again.
    """

    number: int
    overrides: tuple[str, ...]
    digest: str
    changes: list[list[Any]] | None


@dataclass(frozen=True)
class Description:
    """The content of `sweep.json`.

    Args:
        command: the command line that began the sweep.
        cwd: where it was given.
        config_name: the primary file of the recipes.
        overrides: of the command, those of where jobs run included.
        sweeper: the sweeper's name.
        launcher: the launcher's.
        digest: of the command, as in the directory's name.
        version: of the runner.
        sources: fingerprint of all that recipes are composed from; None: it is not known.
        time: seconds since the epoch.
        recipe: the first job's frozen recipe.
        jobs: the jobs that are known in advance; empty: the sweeper chooses them.
        search: `hydra.sweeper` of a search, without what may change; empty: it is none, or an
            older version has begun it.
    """

    command: list[str]
    cwd: str
    config_name: str
    overrides: list[str]
    sweeper: str
    launcher: str
    digest: str
    version: str
    sources: str | None
    time: float
    recipe: dict[str, Any]
    jobs: list[KnownJob]
    format: int = FORMAT
    search: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A sweep directory and its description."""

    path: Path
    description: Description

    def run_dir(self, number: int) -> Path:
        """Return the run directory of a job, which may not exist yet."""
        return self.path / run_name(number)

    def started(self) -> list[int]:
        """Return the numbers of the jobs that have a run directory."""
        return sorted(int(path.name) for path in self.path.glob("[0-9]*") if path.name.isdigit())

    def pending(self) -> tuple[int, ...]:
        """Return the jobs, of those that are known in advance, whose runs are not finished."""
        known = (job.number for job in self.description.jobs)
        return tuple(number for number in known if not sessions.is_done(self.run_dir(number)))

    def recipe(self, number: int) -> Recipe | None:
        """Return the recipe of a job that is known in advance, as composed; None: it is not."""
        jobs = self.description.jobs
        changes = jobs[number].changes if number < len(jobs) else None
        if changes is None:
            return None
        return serialization.from_plain(_applied(self.description.recipe, changes))


def run_name(number: int) -> str:
    """Return the name of a job's run directory."""
    return f"{number:04}"


# -- digests -------------------------------------------------------------------------------


def is_scheduling(override: str) -> bool:
    """Return whether an override only says where, how many at once, or how loud jobs run."""
    if hydra_setup.is_of_logging(override):
        return True
    key = hydra_setup.key_of(override).replace("/", ".")
    if is_setting(override):
        return key != "sweep.list"
    if key in sweepers.SCHEDULING:
        return True
    return key == "hydra.launcher" or key.startswith("hydra.launcher.")


def digest_of(config_name: str, overrides: Sequence[str]) -> str:
    """Return the digest of a command: the same for every start of the same sweep."""
    kept = sorted(override for override in overrides if not is_scheduling(override))
    return _sha256([config_name, kept])[:8]


def _sha256(content: object) -> str:
    text = repr(content)
    if _has_text_keys(content):
        text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def known_job(number: int, overrides: Sequence[str], recipe: Plain, base: Plain) -> KnownJob:
    """Return the entry of a job, whose recipe is frozen as plain containers."""
    changes = None
    if _has_text_keys(recipe):
        changes = [list(change) for change in _changes(base, recipe)]
    return KnownJob(number, tuple(overrides), _sha256(recipe)[:16], changes)


def _has_text_keys(content: object) -> bool:
    if isinstance(content, Mapping):
        return all(isinstance(key, str) and _has_text_keys(one) for key, one in content.items())
    return not isinstance(content, list) or all(map(_has_text_keys, content))


def _changes(base: Plain, plain: Plain, path: tuple[str, ...] = ()) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = [([*path, key],) for key in base if key not in plain]
    for key, value in plain.items():
        if key in base and base[key] == value and type(base[key]) is type(value):
            continue
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            found += _changes(base[key], value, (*path, key))
        else:
            found.append(([*path, key], value))
    return found


def _applied(base: Plain, changes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    result = json.loads(json.dumps(base))
    for (*parents, leaf), *value in changes:
        node = result
        for parent in parents:
            node = node[parent]
        if value:
            node[leaf] = value[0]
        else:
            del node[leaf]
    return result


# -- on disk -------------------------------------------------------------------------------


def read(path: Path) -> Sweep:
    """Return the sweep in a directory.

    Raises:
        ConfigError: if it is none, or its description is damaged.
    """
    file = path / SWEEP
    try:
        content = json.loads(file.read_bytes())
        content["jobs"] = [
            KnownJob(job["number"], tuple(job["overrides"]), job["digest"], job["changes"])
            for job in content["jobs"]
        ]
        return Sweep(path.absolute(), Description(**content))
    except FileNotFoundError as error:
        rule, remedy = f"a sweep directory holds a {SWEEP}", "Name another directory."
        raise ConfigError.of(str(path), rule, remedy) from error
    except (ValueError, TypeError, KeyError) as error:
        rule = f"it is damaged, or of another version of the runner ({error})"
        raise ConfigError.of(str(file), rule, "Start a new sweep with sweep.dir=….") from error


def find(output_dir: str, name: str | None, digest: str) -> Path | None:
    """Return the newest sweep of a command, of any name if it is None; None: there is none."""
    folder = Path(output_dir).expanduser().absolute()
    names = "*" if name is None else glob.escape(name)
    places = (one.parent for one in folder.glob(f"{names}/{SWEEPS}*-{digest}*/{SWEEP}"))
    return max(places, key=lambda place: place.name, default=None)


def place_of(chosen: str | None, recipe: Recipe, digest: str) -> Path | None:
    """Return the directory of the sweep that a command continues; None: it begins one.

    `chosen` is ``sweep.dir``, `recipe` the first job's.

    Raises:
        ConfigError: if the chosen directory holds a run, or another sweep.
    """
    if chosen is None:
        return find(recipe.output_dir, recipe.name, digest)
    path = Path(chosen).expanduser().absolute()
    if not (path / SWEEP).exists():
        if run_directory.is_run(path):
            rule, remedy = "the directory holds a run", "Name another directory."
            raise ConfigError.of(f"sweep.dir={chosen}", rule, remedy)
        return None
    there = read(path).description
    if there.digest != digest:
        kept = [one for one in there.overrides if not is_scheduling(one)]
        rule = f"the directory holds another sweep ({' '.join(kept)})"
        remedy = "Name another directory, or repeat that command."
        raise ConfigError.of(f"sweep.dir={chosen}", rule, remedy)
    return path


def create(chosen: str | None, recipe: Recipe, description: Description) -> Sweep:
    """Create the directory of a sweep, or return that of a command that has just done so.

    Raises:
        ConfigError: if it cannot be written.
    """
    if chosen is None:
        parent = Path(recipe.output_dir).expanduser().absolute() / recipe.name
        name = f"{SWEEPS}{run_directory.stamp()}-{description.digest}"
    else:
        path = Path(chosen).expanduser().absolute()
        parent, name = path.parent, path.name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with locked(parent):
            found = place_of(chosen, recipe, description.digest)
            return read(found) if found else _write(parent / name, description)
    except OSError as error:
        rule = f"a sweep is written there, and that failed ({paths.failure(error)})"
        remedy = "Give sweep.dir=<a folder you may write to>."
        raise ConfigError.of(str(parent / name), rule, remedy) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the context, once no other command does."""
    deadline = time.monotonic() + CREATE_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock.held(folder))
                break
            except lock.HeldError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield


def _write(path: Path, description: Description) -> Sweep:
    text = json.dumps(asdict(description), ensure_ascii=False)
    content = f"{text}\n".encode(errors="surrogateescape")
    if path.is_dir():  # chosen by the person
        checkpoints.write_atomically(path / SWEEP, content)
        return read(path)
    hidden = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    hidden.mkdir()
    try:
        checkpoints.write_atomically(hidden / SWEEP, content)
        os.rename(hidden, path)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    checkpoints.flush_directory(path.parent)
    return read(path)


# -- the same command again ----------------------------------------------------------------


def require_unchanged(there: Sweep, here: Description) -> None:
    """Refuse to continue a sweep whose recipes have changed since it was begun.

    Raises:
        ConfigError: naming each key that differs, with the jobs that it differs in.
    """
    old, new = there.description, here
    shown = str(there.path)
    remedy = "Undo the change, or begin a new sweep with sweep.dir=<a new directory>."
    ConfigError.raise_if(_other_jobs(old, new, shown, remedy))
    problems: dict[tuple[str, str, str], list[int]] = {}
    pairs = zip(old.jobs, new.jobs, strict=True)
    changed = [a.number for a, b in pairs if a.digest != b.digest]
    for number in changed:
        for key, before, after in _differences(old, new, number):
            problems.setdefault((key, str(before), str(after)), []).append(number)
    if not old.jobs:
        for key, before, after in resumed_recipe.differences(old.recipe, new.recipe):
            problems.setdefault((key, str(before), str(after)), [])
    if old.search and new.search:
        for key, before, after in resumed_recipe.differences(old.search, new.search):
            problems.setdefault((f"{sweepers.NODE}.{key}", str(before), str(after)), [])
    ConfigError.raise_if(
        [
            Problem(f"{key}={after}{_in_jobs(jobs)}", f"{key}={before} in {shown}", remedy)
            for (key, before, after), jobs in list(problems.items())[:MOST_DIFFERENCES]
        ]
    )
    if changed and not problems:
        raise ConfigError.of(shown, "its jobs have other recipes than this command's", remedy)


def _other_jobs(old: Description, new: Description, shown: str, remedy: str) -> list[Problem]:
    """Return the problems of jobs with other overrides than there, as of a list that was edited."""
    found: dict[tuple[str, str], list[int]] = {}
    for before, after in zip(old.jobs, new.jobs, strict=False):
        if before.overrides != after.overrides:
            found.setdefault(_apart(before.overrides, after.overrides), []).append(after.number)
    counts = len(old.jobs), len(new.jobs)
    problems = [
        Problem(f"{after}{_in_jobs(numbers)}", f"{before} in {shown}", remedy)
        for (before, after), numbers in found.items()
    ]
    for job in new.jobs[counts[0] :]:
        problems.append(Problem(_job(job), f"{shown} has no such job", remedy))
    for job in old.jobs[counts[1] :]:
        problems.append(Problem(f"no job {job.number}", f"{shown} has {_job(job)}", remedy))
    if counts[0] != counts[1]:
        rule = f"the sweep there has {counts[0]} jobs, and this command has {counts[1]}"
        problems.insert(0, Problem(shown, rule, remedy))
    return problems[:MOST_DIFFERENCES]


def _apart(before: Sequence[str], after: Sequence[str]) -> tuple[str, str]:
    """Return in words what two jobs do not have in common."""
    there, here = ({hydra_setup.key_of(one): one for one in some} for some in (before, after))
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if not keys:  # in another order, or twice
        return " ".join(before), " ".join(after)
    old, new = (" ".join(some.get(k, f"no {k}") for k in keys) for some in (there, here))
    return old, new


def _job(job: KnownJob) -> str:
    return f"job {job.number} ({' '.join(job.overrides) or 'without overrides'})"


def _differences(
    old: Description, new: Description, number: int
) -> list[tuple[str, object, object]]:
    before, after = old.jobs[number].changes, new.jobs[number].changes
    if before is None or after is None:
        return []
    return resumed_recipe.differences(_applied(old.recipe, before), _applied(new.recipe, after))


def _in_jobs(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f" in job{'s' if len(numbers) > 1 else ''} {shown}{more}" if numbers else ""
