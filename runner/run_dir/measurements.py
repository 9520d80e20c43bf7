"""What a finished run has measured, each split at the step it was measured at. Free of torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from runner.run_dir.json_files import METRICS, WEIGHTS_STEP, Fields, JsonObject

PLACE = (
    "step",
    "epoch",
    "samples",
    "split",
    WEIGHTS_STEP,
    "time",
)  # where and when, in metrics.jsonl
OWN = "_value"  # ends the key of a metric with such a name


def measured(run_dir: Path, summary: Fields) -> dict[str, JsonObject]:
    """Return by split the `step` and the `metrics` of one evaluation, from metrics.jsonl.

    Args:
        run_dir: the run.
        summary: content of its summary.json. The evaluation of the validation set is that of its
            best step, else the last one; of other splits it is the last one. The step is that of
            the weights.

    Returns:
        Empty where metrics.jsonl has no such lines.
    """
    splits: dict[str, Fields] = summary.get("metrics") or {}
    best = (summary.get("best") or {}).get("step")
    found: dict[str, JsonObject] = {}
    for record in _evaluations(run_dir / METRICS, splits):
        split = record["split"]
        is_chosen = split == "validation" and split in found and found[split]["step"] == best
        if is_chosen and record["step"] != best:
            continue
        values = {name: record.get(_key(name)) for name in splits[split]}
        known = {name: value for name, value in values.items() if value is not None}
        found[split] = {"step": record.get(WEIGHTS_STEP, record["step"]), "metrics": known}
    return found


def last_values(run_dir: Path, splits: Iterable[str], step: int | None = None) -> JsonObject:
    """Return by "<split>/<metric>" the last measured value, from metrics.jsonl.

    An evaluation need not have all metrics. `step`: only evaluations at that step count; None: all.
    """
    found: JsonObject = {}
    for record in _evaluations(run_dir / METRICS, splits):
        if step is not None and record["step"] != step:
            continue
        for key, value in record.items():
            if key not in PLACE and value is not None:
                found[f"{record['split']}/{_name(key)}"] = value
    return found


def history(run_dir: Path, split: str, metric: str) -> dict[int, float]:
    """Return a metric by the steps at which it was measured, from metrics.jsonl."""
    found: dict[int, float] = {}
    for record in _evaluations(run_dir / METRICS, (split,)):
        value = record.get(_key(metric))
        with contextlib.suppress(ValueError):  # a text of somebody's is no measurement
            if value is not None:
                found.setdefault(record["step"], float(str(value)))
    return found


def _name(key: str) -> str:
    """Return the name of a metric whose key in metrics.jsonl is `key`."""
    name = key.removesuffix(OWN)
    return name if name in PLACE else key


def _key(name: str) -> str:
    """Return the key of a metric in metrics.jsonl, where some names are the run's own."""
    return f"{name}{OWN}" if name in PLACE else name


def _evaluations(path: Path, splits: Iterable[str]) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    splits = tuple(splits)
    marks = {f'"split": {json.dumps(split)}'.encode() for split in splits}
    for line in lines:
        if not any(mark in line for mark in marks):
            continue
        try:
            record = json.loads(line)
            if record["split"] in splits and isinstance(record["step"], int):
                yield record
        except (ValueError, KeyError, TypeError):  # cut off by a kill
            continue
