"""One job, frozen: what a run's processes read, and all they read. Free of torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.errors import ConfigError, Problem
from runner import paths, recipe, trust
from runner.schema import Recipe

CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
JOB = "job.json"


@dataclass(frozen=True)
class Job:
    """Where a run lies and how it was asked for.

    Args:
        run_dir: its directory, claimed.
        overrides: what the command line changed.
        resume_from: the checkpoint it goes on from; None: from the beginning.
        imports: the user's packages that it needs.
        cwd: where it was started; code there can be imported.
        config_name: the primary file of `conf/`.
    """

    run_dir: Path
    overrides: tuple[str, ...] = ()
    resume_from: str | None = None
    imports: tuple[str, ...] = ()
    cwd: str = "."
    config_name: str = "config"

    def save(self, frozen: Recipe) -> None:
        """Write the recipe and this job into the run directory.

        The recipe of an invocation that is resumed is kept as config.<n>.yaml. What DeepSpeed's own
        file says goes into the recipe: the file may change, and the run may go on from elsewhere.
        """
        _keep_previous(self.run_dir / CONFIG)
        plain = recipe.to_plain(frozen)
        if frozen.deepspeed is not None and frozen.deepspeed.hf_ds_config is not None:
            plain["deepspeed"]["hf_ds_config"] = frozen.deepspeed.given_config()
        recipe.write_yaml(self.run_dir / CONFIG, plain)
        recipe.write_yaml(self.run_dir / OVERRIDES, list(self.overrides))
        content = {**asdict(self), "run_dir": str(self.run_dir)}
        (self.run_dir / JOB).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, run_dir: str | Path) -> tuple[Job, Recipe]:
        """Read a run directory, and import the packages that this process trusts.

        What a run directory says it needs is checked against what is trusted here: a directory from
        elsewhere does not decide which code is run.

        Raises:
            ConfigError: if it is no run directory, or needs a package that is not trusted.
        """
        job, plain = cls.read(run_dir)
        paths.settle()
        lacking = [name for name in job.imports if name not in trust.trusted()]
        ConfigError.raise_if([_untrusted(name, job.run_dir) for name in lacking])
        trust.import_packages()
        return job, recipe.from_plain(plain)

    @classmethod
    def read(cls, run_dir: str | Path) -> tuple[Job, dict[str, object]]:
        """Read a run directory: the job, and the recipe as plain containers; nothing is imported.

        Raises:
            ConfigError: if it is no run directory.
        """
        folder = Path(run_dir).resolve()
        try:
            content = json.loads((folder / JOB).read_text(encoding="utf-8"))
            content["run_dir"] = folder  # it may have been moved
            for name in ("overrides", "imports"):
                content[name] = tuple(content[name])
            job = cls(**content)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                Problem(
                    str(run_dir),
                    f"it is no run directory: {_reason(error, folder)}",
                    "Name a folder such as runs/<name>/<time>-<id>.",
                )
            ) from error
        return job, recipe.read_yaml(folder / CONFIG)


def _reason(error: Exception, folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    return f"{JOB} is missing" if isinstance(error, OSError) else f"{JOB} is damaged ({error})"


def _untrusted(name: str, run_dir: Path) -> Problem:
    return Problem(
        f"{run_dir}",
        f"the run needs the package {name!r}, which is not trusted here",
        f"Start from its project's folder, or give --import {name}.",
    )


def _keep_previous(path: Path) -> None:
    if path.exists():
        number = len(list(path.parent.glob("config.*.yaml"))) + 1
        path.rename(path.with_name(f"config.{number}.yaml"))
