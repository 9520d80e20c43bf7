"""Types of the fields that the JSON files of a run have, for what reads them. Free of torch.

A file may be damaged, or written by another program: a field of another type is left out and
named, so that one run does not keep a command from the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from runner.run_dir.json_files import WEIGHTS_STEP, JsonObject

WRONG = object()
OTHERS = "*"  # the type of the fields that a mapping does not name
LATEST = 1e11  # seconds since the epoch that a calendar can show
MOST = 2**63
MOST_NAMED = 3
INFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# A leaf returns the value as it is read, or WRONG.
Leaf = Callable[[object], object]


@dataclass(frozen=True)
class Each:
    """A mapping of any names to values of one type, or a list of them (`listed`); none is null."""

    type: FieldType
    listed: bool = False


FieldType = Leaf | Mapping[str, Any] | Each


def number(value: object) -> float | None:
    """Return a number as metrics.jsonl and summary.json have it, "NaN" among them; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < MOST or isinstance(value, float) else None
    return INFINITE.get(value) if isinstance(value, str) else None


def anything(value: object) -> object:
    """Accept every value."""
    return value


def word(value: object) -> object:
    """Accept text."""
    return value if isinstance(value, str) else WRONG


def text(value: object) -> object:
    """Accept text or null."""
    return value if value is None or isinstance(value, str) else WRONG


def flag(value: object) -> object:
    """Accept true, false or null."""
    return value if value is None or isinstance(value, bool) else WRONG


def count(value: object) -> object:
    """Accept an integer or null."""
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST
    return value if value is None or whole else WRONG


def quantity(value: object) -> object:
    """Accept a finite number or null."""
    found = number(value)
    return value if value is None or (found is not None and math.isfinite(found)) else WRONG


def seconds(value: object) -> object:
    """Accept a duration or a time since the epoch, or null."""
    found = number(value)
    return value if value is None or (found is not None and 0 <= found < LATEST) else WRONG


def measured(value: object) -> object:
    """Accept a number; those that JSON lacks are written as words."""
    found = number(value)
    return WRONG if found is None else value if isinstance(value, int) else found


METRICS_OF_SPLITS = Each(Each(measured))
BEST: FieldType = {
    **{"metric": text, "mode": text, "value": measured, "step": count, "checkpoint": text},
}
SUMMARY: FieldType = {
    **dict.fromkeys(("name", "run_dir", "stopped", "reason", "monitor", "mode"), text),
    **dict.fromkeys(("step", "epoch", "samples", "num_processes", "num_parameters"), count),
    WEIGHTS_STEP: count,
    **{"complete": flag, "seconds": seconds, "ended": seconds, "samples_per_second": quantity},
    **{"best": BEST, "metrics": METRICS_OF_SPLITS, "checkpoint": text},
    **{"memory": Each(quantity)},
}
_GIT: FieldType = {
    **dict.fromkeys(("sha", "branch", "root", "reason", "diff_sha256", "untracked_sha256"), text),
    **{"dirty": flag, "diff_complete": flag, "diff_bytes": count, "num_untracked": count},
    **{"num_untracked_python": count, "num_untracked_kept": count, "untracked_bytes": count},
    **{"untracked": Each(word, listed=True)},
}
_FILES: FieldType = {
    **{"path": word, "files": count, "bytes": quantity, "newest": quantity, "complete": flag},
    **{"digest": text},
}
ENVIRONMENT: FieldType = {
    **dict.fromkeys(("python", "platform", "hostname", "cwd", "cpu"), text),
    **{"started": seconds, "cpu_count": count, "command": Each(word, listed=True)},
    **{"packages": Each(text), "code": Each(text), "data": Each(_FILES)},
    **{"git": _GIT, "runner_git": _GIT, "device": {"type": text, "count": count}},
}
JOB: FieldType = {
    **dict.fromkeys(("run_dir", "cwd", "config_name", "resume_from", "recipe"), text),
    **{"overrides": Each(word, listed=True), "imports": Each(word, listed=True)},
    **{"log_levels": Each(word)},
}
RECORD: FieldType = {  # a line of metrics.jsonl
    **{"step": count, "epoch": count, "samples": count, "split": text, "time": seconds},
    **{WEIGHTS_STEP: count, OTHERS: measured},
}
EVALUATIONS: FieldType = {
    "evaluations": Each(
        {
            **{"checkpoint": text, "step": count, "metrics": METRICS_OF_SPLITS, "time": text},
            **{"overrides": Each(word, listed=True), "num_processes": count, "seconds": seconds},
            **{"versions": Each(text), "data": Each(_FILES)},
            **{"notes": Each(word, listed=True), "code": Each(text)},
        },
        listed=True,
    )
}
OUTCOME: FieldType = {
    **{"rank": count, "time": seconds, "code": count, "is_consequence": flag},
    **{"message": text, "traceback": text, "full": text},
}
JOURNAL: FieldType = {
    **dict.fromkeys(("event", "status", "attempt", "reason"), text),
    **{"job": count, "time": seconds, "overrides": Each(word, listed=True)},
}


def loads(content: bytes) -> Any:
    """Return the value of JSON.

    Raises:
        ValueError: if it is none, or nested beyond reason; the message has no position.
    """
    if not content.strip(b"\0 \t\r\n"):
        raise ValueError("it is empty")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def fitted(found: object, type_: FieldType) -> tuple[JsonObject, str]:
    """Return a mapping without the fields that have another type, and which they are, in words.

    Args:
        found: what a file holds.
        type_: one of the tables above.
    """
    if not isinstance(found, Mapping):
        return {}, "it is no mapping"
    wrong: list[str] = []
    value = cast(JsonObject, _fitted(found, type_, "", wrong))
    more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
    named = f"wrong value at {', '.join(wrong[:MOST_NAMED])}{more}" if wrong else ""
    return value, named


def _fitted(value: object, type_: FieldType, key: str, wrong: list[str]) -> object:
    found = value
    if isinstance(type_, Each):
        found = _each(value, type_, key, wrong)
    elif not isinstance(type_, Mapping):
        found = type_(value)
    elif isinstance(value, Mapping):
        read = {
            name: _fitted(item, type_.get(name, type_.get(OTHERS, anything)), _at(key, name), wrong)
            for name, item in value.items()
        }
        return {name: item for name, item in read.items() if item is not WRONG}
    elif value is not None:
        found = WRONG
    if found is WRONG:
        wrong.append(key)
    return found


def _each(value: object, type_: Each, key: str, wrong: list[str]) -> object:
    if value is None:
        return value
    if not isinstance(value, list if type_.listed else Mapping):
        return WRONG
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    read: list[tuple[object, object]] = []
    for name, item in items:
        container = isinstance(type_.type, Mapping | Each)
        found = WRONG if item is None and container else item
        if found is WRONG:
            wrong.append(_at(key, name))
        else:
            found = _fitted(item, type_.type, _at(key, name), wrong)
        if found is not WRONG:
            read.append((name, found))
    return [item for _, item in read] if type_.listed else dict(read)


def _at(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
