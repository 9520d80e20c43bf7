"""Filters of runs, as they are written on a command line: ``status=failed optimizer.lr<0.01``."""

from __future__ import annotations

import fnmatch
import json
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from accel.machine.errors import ConfigError, Problem, nearest
from runner.recipe import keys
from runner.runs.record import MISSING, STATUSES, RunRecord

_FILTER = re.compile(r"([A-Za-z_][\w.]*)(!=|>=|<=|=|<|>)(?![=<>])(.*)", re.DOTALL)
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    **{">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

# Values of a run beside those of its recipe.
FIELDS: dict[str, Callable[[RunRecord], Any]] = {
    "status": lambda run: run.status,
    "tag": lambda run: run.tags,
    "step": lambda run: run.step,
    "objective": lambda run: None if run.objective is None else run.objective.value,
    "seconds": lambda run: run.seconds,
    "directory": lambda run: str(run.path),
    "sweep": lambda run: run.sweep,
    "started": lambda run: run.started,
}
TIMES = {"since": ">=", "before": "<"}  # how ``started`` is compared


@dataclass(frozen=True)
class Filter:
    """One condition: a key of a run, a sign, and the values of which one is to match."""

    key: str
    sign: str
    values: tuple[str, ...]

    def matches(self, run: RunRecord) -> bool:
        """Return whether a run fulfills the condition; one that lacks the key does not."""
        found = value_of(run, self.key)
        if found is MISSING:
            return False
        if self.sign in ORDERS:
            left, right = _number(found), _number(self.values[0])
            return left is not None and right is not None and ORDERS[self.sign](left, right)
        same = any(_same(found, value) for value in self.values)
        return same == (self.sign == "=")


def value_of(run: RunRecord, key: str) -> Any:
    """Return a run's value of `FIELDS`, else of its recipe; `MISSING` where it has no such key."""
    return FIELDS[key](run) if key in FIELDS else run.value(key)


def parse(words: Sequence[str]) -> list[Filter]:
    """Return the filters that words of a command line are.

    Raises:
        ConfigError: naming every word that is none.
    """
    found: list[Filter] = []
    problems: list[Problem] = []
    for word in words:
        match = _FILTER.fullmatch(word)
        if match is None:
            remedy = "Write key=value, as status=failed, tag=x, since=2d or optimizer.lr=0.01."
            problems.append(Problem(word, "it is neither a folder nor a filter", remedy))
            continue
        key, sign, text = match.groups()
        if key in TIMES:
            moment = _moment(text) if sign == "=" else None
            if moment is None:
                rule = "a time is an age such as 30m, 2d or 1w, or a date such as 2026-11-24"
                problems.append(Problem(word, rule, f"Write {key}=2d."))
                continue
            key, sign, text = "started", TIMES[key], str(moment)
        one = Filter(key, sign, tuple(text.split(",")))
        problems += _problems(one, word)
        found.append(one)
    ConfigError.raise_if(problems)
    return found


def _problems(one: Filter, word: str) -> list[Problem]:
    if one.key == "status":
        wrong = [value for value in one.values if value not in STATUSES]
        rule = f"it is one of {', '.join(STATUSES)}"
        return [Problem(f"status={value}", rule, nearest(value, STATUSES)) for value in wrong]
    if one.sign in ORDERS and _number(one.values[0]) is None:
        return [Problem(word, f"{one.sign} compares numbers", f"Write {one.key}={one.values[0]}.")]
    return []


def apply(filters: Sequence[Filter], runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the runs that fulfill all filters.

    Raises:
        ConfigError: naming each key that neither a run nor the schema has.
    """
    runs = list(runs)
    require_keys([one.key for one in filters], runs)
    return [run for run in runs if all(one.matches(run) for one in filters)]


def require_keys(names: Iterable[str], runs: Sequence[RunRecord]) -> None:
    """Refuse keys that neither the schema nor the recipe of any of the runs has.

    Raises:
        ConfigError: naming each, and the nearest that there is.
    """
    problems = []
    known = {*FIELDS, *TIMES, *keys.typed_keys()}
    for name in names:
        if name not in known - {*TIMES} and all(run.value(name) is MISSING for run in runs):
            known |= {".".join(key) for run in runs for key, _ in leaves(run.recipe)}
            rule = "neither a run nor a recipe has such a key"
            problems.append(Problem(name, rule, keys.suggestion(name, sorted(known))))
    ConfigError.raise_if(problems)


def leaves(node: Any, key: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Yield (key as parts, value) of everything in nested mappings that is none itself."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, (*key, str(name)))
    else:
        yield key, node


def _same(found: Any, wanted: str) -> bool:
    if isinstance(found, list):
        return any(_same(item, wanted) for item in found)
    left, right = _number(found), _number(wanted)
    if left is not None and right is not None:
        return left == right
    text = json.dumps(found) if found is None or isinstance(found, bool) else str(found)
    return fnmatch.fnmatchcase(text, wanted)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _moment(text: str) -> float | None:
    """Return the time that an age or a date means, in seconds since the epoch; else None."""
    if match := _AGE.fullmatch(text):
        return time.time() - float(match[1]) * UNITS[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
