"""The study that the runs of a sweep belong to: `optuna.json` in the sweep's folder. Free of torch.

A run of such a sweep lies in ``<sweep>/<job number>``; its process finds its trial by that number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accel.machine.errors import ConfigError, nearest
from runner.runs.json_files import METRICS, WEIGHTS_STEP, JsonObject, read_lines, write_json

FILE = "optuna.json"
JOURNAL = "optuna.journal"
BEST = "best"  # the best value of the monitored validation metric
VALIDATION, TEST = SPLITS = ("validation", "test")
# Keys of metrics.jsonl that are no metrics; one with such a name ends with `OWN`.
PLACE = ("step", "epoch", "samples", "split", WEIGHTS_STEP, "time")
OWN = "_value"


@dataclass(frozen=True)
class StudyFile:
    """Where the study of a sweep is stored, and what its runs report.

    Attributes:
        storage: URL of a database, or path of a journal, from the sweep's folder.
        name: of the study in its storage.
        metric: the validation metric that runs report at each evaluation; None: the monitored one.
        mode: whether its best is the "max" or the "min"; None: runs report nothing, since the
            objective is no such metric, or there are several.
        pruner: name and arguments of the pruner; empty: none.
        metrics: the objectives of the search, as `values_of` reads them.
        modes: "min" or "max" of each.
    """

    storage: str
    name: str
    metric: str | None = None
    mode: str | None = None
    pruner: Mapping[str, object] = field(default_factory=dict)
    metrics: Sequence[str] = (BEST,)
    modes: Sequence[str] = ()

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
    found = of_sweep(run_dir.parent) if run_dir.name.isdigit() else None
    return None if found is None else (found, int(run_dir.name))


def of_sweep(sweep_dir: Path) -> StudyFile | None:
    """Return the study of a sweep; None: it has none.

    Raises:
        ConfigError: if its file is damaged.
    """
    path = sweep_dir / FILE
    if not path.exists():
        return None
    try:
        return StudyFile(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        rule = f"it describes the study of a sweep, and is damaged ({error})"
        remedy = "Restore it from a copy, or begin a new search with sweep.dir=DIR."
        raise ConfigError.of(str(path), rule, remedy) from error


def values_of(summary: Mapping[str, object], metrics: Sequence[str], run_dir: Path) -> list[float]:
    """Return the objectives of a run; see `value_of`.

    Where metrics of the validation and of the test set are among them, they are of the same
    weights: those that the test used.
    """
    splits = {metric.partition("/")[0] for metric in metrics}
    step = weights_step(summary) if splits.issuperset(SPLITS) else None
    return [
        _at_step(metric, run_dir, step)
        if step is not None and metric.startswith(f"{VALIDATION}/")
        else value_of(summary, metric, run_dir)
        for metric in metrics
    ]


def step_of(summary: Mapping[str, object], metrics: Sequence[str]) -> object:
    """Return the step whose weights the objectives of a run are of; None: not known."""
    tested = any(metric.startswith(f"{TEST}/") for metric in metrics)
    step = weights_step(summary) if tested else None
    return summary.get("step") if step is None else step


def weights_step(summary: Mapping[str, object]) -> int | None:
    """Return the step whose weights the test used; None: not known, or there was no test."""
    step = summary.get(WEIGHTS_STEP)
    return step if isinstance(step, int) else None


def _at_step(metric: str, run_dir: Path, step: int) -> float:
    measured = last_values(run_dir, (VALIDATION,), step)
    if metric not in measured:
        found = ", ".join(measured) or "nothing"
        rule = f"at step {step}, whose weights were tested, the run measures {found}"
        remedy = "Give objectives of one split, or measure it in each evaluation."
        raise ConfigError.of(f"hydra.sweeper.metrics={metric}", rule, remedy)
    return float(str(measured[metric]))


def value_of(summary: Mapping[str, object], metric: str, run_dir: Path | None = None) -> float:
    """Return an objective of a run; NaN where the run has measured nothing.

    Args:
        summary: the content of its `summary.json`.
        metric: as `hydra.sweeper.metrics` names it. One of a split is the last measured value: not
            every evaluation need have it.
        run_dir: the run, whose earlier evaluations count as well; None: the last ones alone do.

    Raises:
        ConfigError: if the run measures no such metric.
    """
    split, slash, _ = metric.partition("/")
    value = summary.get(metric)
    if metric == BEST:
        value = value.get("value") if isinstance(value, Mapping) else None
    elif slash and split in SPLITS:
        measured = _measured(summary)
        if metric not in measured and run_dir is not None:
            measured |= last_values(run_dir, SPLITS)
        if metric not in measured:
            rule = f"the run measures {', '.join(measured) or 'nothing'}"
            raise ConfigError.of(f"hydra.sweeper.metrics={metric}", rule, nearest(metric, measured))
        value = measured[metric]
    return math.nan if value is None else float(str(value))


def _measured(summary: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics of all splits, by "<split>/<metric>"."""
    splits = summary.get("metrics")
    return {
        f"{split}/{name}": value
        for split, values in (splits.items() if isinstance(splits, Mapping) else ())
        for name, value in values.items()
    }


def last_values(run_dir: Path, splits: Sequence[str], step: int | None = None) -> JsonObject:
    """Return by "<split>/<metric>" the last measured value, from metrics.jsonl.

    An evaluation need not have all metrics. `step`: only evaluations at that step count; None: all.
    """
    found: JsonObject = {}
    for record in read_lines(run_dir / METRICS):
        split, at = str(record.get("split")), record.get("step")
        if split not in splits or (step is not None and at != step):
            continue
        for key, value in record.items():
            if key not in PLACE and value is not None:
                name = key.removesuffix(OWN)
                found[f"{split}/{name if name in PLACE else key}"] = value
    return found
