"""One frozen job: the only input of the processes of a run. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from accel.machine.errors import ConfigError, Problem
from runner.recipe import paths, serialization, trust
from runner.recipe.schema import Recipe
from runner.run_dir import atomic_update
from runner.run_dir.atomic_update import CONFIG

OVERRIDES = "overrides.yaml"
JOB = "job.json"


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
        content["run_dir"] = str(self.run_dir)
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

        Nothing is imported.

        Raises:
            ConfigError: if it is no run directory, or one of its files is damaged.
        """
        folder = Path(run_dir).resolve()
        files = {name: atomic_update.read(folder, name) for name in (CONFIG, JOB)}
        for name, content in files.items():
            if not content:
                raise _no_run(folder, f"{name} is missing or empty")
        text = (files[CONFIG] or b"").decode("utf-8", errors="replace")
        plain = serialization.parse_yaml(text, folder / CONFIG)
        place = atomic_update.run_dir_of(folder)  # it may have been moved
        try:
            found = json.loads(files[JOB] or b"")
            found |= {"run_dir": place, "folder": folder if folder != place else None}
            found |= {name: tuple(found[name]) for name in ("overrides", "imports")}
            return cls(**found), plain
        except (ValueError, TypeError, KeyError) as error:
            raise _no_run(folder, f"{JOB} is damaged ({error})") from error


def _no_run(folder: Path, wrong: str) -> ConfigError:
    return ConfigError.of(
        str(folder),
        f"it is no run directory: {wrong if folder.is_dir() else 'there is no such folder'}",
        "Name a folder such as runs/<name>/<time>-<id>.",
    )


def _untrusted(name: str, run_dir: Path) -> Problem:
    return Problem(
        f"{run_dir}",
        f"the run needs the package {name!r}, which is not trusted here",
        f"Start from its project's folder, or give --import {name}.",
    )
