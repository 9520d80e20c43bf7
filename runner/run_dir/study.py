"""The study that the runs of a sweep belong to: `optuna.json` in the sweep's folder. Free of torch.

A run of such a sweep lies in ``<sweep>/<job number>``; its process finds its trial by that number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accel.errors import ConfigError
from runner.run_dir.json_files import write_json

FILE = "optuna.json"
JOURNAL = "optuna.journal"


@dataclass(frozen=True)
class StudyFile:
    """Where the study of a sweep is stored, and what its runs report.

    Attributes:
        storage: URL of a database, or path of a journal, from the sweep's folder.
        name: of the study in its storage.
        sweep: name of the sweep's folder, by which its trials are marked in a shared storage.
        metric: the validation metric that runs report at each evaluation; None: the monitored one.
        mode: whether its best is the "max" or the "min"; None: runs report nothing, since the
            objective is no such metric, or there are several.
        pruner: name and arguments of the pruner; empty: none.
    """

    storage: str
    name: str
    sweep: str
    metric: str | None = None
    mode: str | None = None
    pruner: Mapping[str, object] = field(default_factory=dict)

    def write(self, sweep_dir: Path) -> None:
        """Write this to the sweep's folder, in one piece."""
        write_json(sweep_dir / FILE, asdict(self))


def job_folder(sweep_dir: Path, number: int) -> Path:
    """Return the run directory of a job, which counts from 0."""
    return sweep_dir / f"{number:04d}"


def of_run(run_dir: Path) -> tuple[StudyFile, int] | None:
    """Return the study that a run belongs to and its job number; None: it belongs to none.

    Raises:
        ConfigError: if the file of the study is damaged.
    """
    path = run_dir.parent / FILE
    if not run_dir.name.isdigit() or not path.exists():
        return None
    try:
        return StudyFile(**json.loads(path.read_text(encoding="utf-8"))), int(run_dir.name)
    except (ValueError, TypeError) as error:
        rule = f"it describes the study of a sweep, and is damaged ({error})"
        raise ConfigError.of(str(path), rule, "Give the command of the sweep again.") from error
