"""One frozen job: the only input of the processes of a run. Free of torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError, Problem
from runner.recipe import paths, serialization, trust
from runner.recipe.schema import Recipe
from runner.run_dir import atomic_update
from runner.run_dir.atomic_update import CONFIG
from runner.run_dir.provenance import ENVIRONMENT

logger = logging.getLogger(__name__)

OVERRIDES = "overrides.yaml"
JOB = "job.json"
# Under this name job.json holds the text of config.yaml, so that either can be restored.
RECIPE = "recipe"


@dataclass(frozen=True)
class Job:
    """The claimed directory of a run and the command that started it.

    It resumes from the checkpoint `resume_from`; None: from the beginning. It needs the user's
    packages `imports`; code in `cwd`, where it was started, can be imported. `log_levels` are those
    of loggers by name. Its files are in `folder` until they are committed; None: in the run
    directory.
    """

    run_dir: Path
    overrides: tuple[str, ...] = ()
    resume_from: str | None = None
    imports: tuple[str, ...] = ()
    cwd: str = "."
    config_name: str = "config"
    log_levels: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = field(default=None, compare=False)

    @property
    def place(self) -> Path:
        """The folder that holds this job's files."""
        return self.folder or self.run_dir

    def save(self, frozen: Recipe) -> None:
        """Make the recipe and this job those of the run directory, all at once.

        The recipe before is kept as config.<n>.yaml.
        """
        atomic_update.commit(self.stage(frozen).place)

    def stage(self, frozen: Recipe) -> Job:
        """Write the recipe and this job beside those of the run directory.

        Return the job as it lies there, for `atomic_update.commit` or `atomic_update.discard`.
        """
        staged = replace(self, folder=atomic_update.stage(self.run_dir))
        try:
            staged._write(frozen)
        except BaseException:
            atomic_update.discard(staged.place)
            raise
        return staged

    def _write(self, frozen: Recipe) -> None:
        text = serialization.yaml_text(serialization.frozen_plain(frozen))
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "folder"}
        content |= {"run_dir": str(self.run_dir), RECIPE: text}
        (self.place / CONFIG).write_text(text, encoding="utf-8")
        overrides = serialization.yaml_text(list(self.overrides))
        (self.place / OVERRIDES).write_text(overrides, encoding="utf-8")
        (self.place / JOB).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, run_dir: str | Path) -> tuple[Job, Recipe]:
        """Read a run directory, and import the packages that this process trusts.

        The packages that a run directory requires are checked against those trusted here: a
        directory from another machine does not decide which code runs.

        Raises:
            ConfigError: if it is no run directory, or needs a package that is not trusted.
        """
        job, plain = cls.read(run_dir)
        paths.move_project_last()
        lacking = [name for name in job.imports if name not in trust.trusted()]
        ConfigError.raise_if([_untrusted(name, job.run_dir) for name in lacking])
        trust.import_packages()
        return job, serialization.from_plain(plain)

    @classmethod
    def read(cls, run_dir: str | Path) -> tuple[Job, dict[str, object]]:
        """Read a run directory, or an attempt in it: the job, and the recipe as plain containers.

        Nothing is imported. Where one of config.yaml and job.json is missing, empty or truncated,
        it is taken from the other, with a warning.

        Raises:
            ConfigError: if it is no run directory.
        """
        folder = Path(run_dir).resolve()
        content, text = _job_and_recipe(folder)
        plain = serialization.parse_yaml(text, folder / CONFIG)
        content["run_dir"] = atomic_update.run_dir_of(folder)  # it may have been moved
        content["folder"] = folder if folder != content["run_dir"] else None
        return cls(**content), plain


def mend(run_dir: Path) -> None:
    """Rewrite config.yaml and job.json where they are damaged. Requires the run's lock."""
    content, text = _job_and_recipe(run_dir)
    if _decoded(atomic_update.read(run_dir, CONFIG)) != text:
        checkpoints.write_atomically(run_dir / CONFIG, text.encode())
    if _job_content(run_dir)[0] is None:
        job = {"resume_from": None, "imports": (), "config_name": "config", RECIPE: text}
        body = json.dumps({"run_dir": str(run_dir), **job, **content}, indent=2)
        checkpoints.write_atomically(run_dir / JOB, f"{body}\n".encode())


def _job_and_recipe(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the arguments of a run's `Job` and the text of its recipe, or raise a ConfigError."""
    content, wrong = _job_content(folder)
    text = _decoded(atomic_update.read(folder, CONFIG))
    kept = None if content is None else content.pop(RECIPE, None)
    if text is None or (kept is not None and text != kept and kept.startswith(text)):
        if kept is None:
            raise ConfigError(_no_run(folder, wrong or f"{CONFIG} is missing or empty"))
        _warn_once(f"{folder / CONFIG} is missing, empty or truncated: it is read from {JOB}.")
        text = kept
    if content is None:
        _warn_once(f"{folder}: {wrong}. It is put together from other files.")
        content = _from_other_files(folder)
    return content, text


@cache
def _warn_once(message: str) -> None:
    """Warn of damage once a process: a command reads the same run several times."""
    logger.warning("%s", message)


def _job_content(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the arguments of a `Job`, with the text of the recipe; None, and why there is none."""
    found = atomic_update.read(folder, JOB)
    if found is None:
        return None, f"{JOB} is missing" if folder.is_dir() else "there is no such folder"
    try:
        content = json.loads(found)
        return _checked(content), ""
    except (ValueError, TypeError, KeyError) as error:
        return None, f"{JOB} is damaged ({error})"


def _checked(content: object) -> dict[str, Any]:
    """Return job.json's content in the types of a `Job`; raises KeyError or TypeError."""
    if not isinstance(content, Mapping):
        raise TypeError("it is no mapping")
    checked = dict(content)
    for name in ("overrides", "imports"):
        values = checked[name]
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise TypeError(f"{name} is no list of words")
        checked[name] = tuple(values)
    levels = checked.get("log_levels", {})
    if not isinstance(levels, Mapping) or not all(isinstance(one, str) for one in levels.values()):
        raise TypeError("log_levels is no mapping of words")
    for name in ("run_dir", "cwd", "config_name"):
        if not isinstance(checked[name], str):
            raise TypeError(f"{name} is no text")
    for name in ("resume_from", RECIPE):
        if not isinstance(checked.get(name), (str, type(None))):
            raise TypeError(f"{name} is no text")
    Job(**{name: value for name, value in checked.items() if name != RECIPE})
    return checked


def _from_other_files(folder: Path) -> dict[str, Any]:
    """Return the fields of a job that overrides.yaml and environment.json contain."""
    overrides: list[str] = []
    found = _decoded(atomic_update.read(folder, OVERRIDES))
    if found is not None:
        overrides = serialization.parse_list(found, folder / OVERRIDES)
    try:
        where = json.loads(atomic_update.read(folder, ENVIRONMENT) or b"{}").get("cwd", ".")
    except (ValueError, AttributeError) as error:
        logger.warning("%s is damaged (%s).", folder / ENVIRONMENT, error)
        where = "."
    return {"overrides": tuple(overrides), "cwd": str(where)}


def _decoded(found: bytes | None) -> str | None:
    """Return a file's text; None for one that is missing or empty, or was never flushed."""
    text = None if found is None else found.decode("utf-8", errors="replace")
    return text if text is not None and text.strip("\0 \t\r\n") and "\0" not in text else None


def _no_run(folder: Path, wrong: str) -> Problem:
    rule = f"it is no run directory: {wrong}"
    remedy = "Name a folder such as runs/<name>/<time>-<id>."
    earlier = atomic_update.kept_recipes(folder) if folder.is_dir() else []
    if earlier:
        remedy = f"An earlier recipe is {earlier[-1].name}: copy it to {CONFIG} to use that."
    return Problem(str(folder), rule, remedy)


def _untrusted(name: str, run_dir: Path) -> Problem:
    return Problem(
        f"{run_dir}",
        f"the run needs the package {name!r}, which is not trusted here",
        f"Start from its project's folder, or give --import {name}.",
    )
