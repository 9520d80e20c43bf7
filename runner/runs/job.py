"""One frozen job: the only input of the processes of a run. Free of torch."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError, Problem
from runner.recipe import facts, paths, serialization, trust
from runner.recipe.schema import Recipe
from runner.runs import sessions
from runner.runs.sessions import CONFIG, JOB


@dataclass(frozen=True)
class Job:
    """The claimed directory of a run and the command that started it.

    It resumes from the checkpoint `resume_from`; None: from the beginning. It needs the user's
    packages `imports`; code in `cwd`, where it was started, can be imported. `log_levels` are those
    of loggers by name. `restart`: it counts for `distributed.max_restarts`. `states` is the name of
    the run's folder below `checkpoint.project.project_dir`. Its files are in the session `folder`;
    None: they are not written.
    """

    run_dir: Path
    overrides: tuple[str, ...] = ()
    resume_from: str | None = None
    imports: tuple[str, ...] = ()
    cwd: str = "."
    config_name: str = "config"
    log_levels: Mapping[str, str] = field(default_factory=dict)
    restart: bool = False
    states: str = field(default="", compare=False)
    folder: Path | None = field(default=None, compare=False)

    @property
    def place(self) -> Path:
        """The folder of this job's session; before it is saved, the run directory."""
        return self.folder or self.run_dir

    def save(self, frozen: Recipe) -> Job:
        """Write the recipe and this job to a new session of the run; return the job there."""
        first = sessions.of_run(self.run_dir)[:1]
        states = (
            Job.read(first[0])[0].states if first else f"{self.run_dir.name}-{secrets.token_hex(4)}"
        )
        plain = serialization.frozen_plain(frozen)
        if sessions.begun(self.run_dir):
            plain = facts.recorded(plain, Job.read(self.run_dir)[1])
        staged = replace(self, folder=sessions.create(self.run_dir), states=states)
        content = {f.name: getattr(staged, f.name) for f in fields(self) if f.name != "folder"}
        content["run_dir"] = str(self.run_dir)
        staged._write_recipe(plain)
        text = json.dumps(content, indent=2)
        checkpoints.write_atomically(staged.place / JOB, f"{text}\n".encode())
        return staged

    def _write_recipe(self, plain: dict[str, object]) -> None:
        text = serialization.yaml_text(plain)
        checkpoints.write_atomically(self.place / CONFIG, text.encode())

    def record_facts(self, known: Mapping[str, object]) -> None:
        """Fill in the facts of the data in the session's recipe."""
        from omegaconf import OmegaConf

        plain: Any = OmegaConf.to_container(OmegaConf.load(self.place / CONFIG))
        if next(facts.late(plain), None) is not None:
            self._write_recipe(facts.filled(plain, known))

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
        """Read the job and the recipe, as plain containers, of a run or of a session.

        Nothing is imported.

        Raises:
            ConfigError: if it is no run directory, or one of its files is damaged.
        """
        folder = Path(run_dir).resolve()
        here = sessions.current(folder) or folder
        files = {name: sessions.read(folder, name) for name in (CONFIG, JOB)}
        for name, content in files.items():
            if not content:
                raise _no_run(folder, f"{here / name} is missing or empty")
        text = (files[CONFIG] or b"").decode("utf-8", errors="replace")
        plain = serialization.parse_yaml(text, here / CONFIG)
        place = sessions.run_dir_of(folder)  # it may have been moved
        try:
            found = json.loads(files[JOB] or b"")
            found |= {"run_dir": place, "folder": here}
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
