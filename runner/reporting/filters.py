"""Filters of runs, as they are written on a command line: ``status=failed optimizer.lr<0.01``."""

from __future__ import annotations

import fnmatch
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

from accel.machine.errors import ConfigError, Problem, Problems, closest, did_you_mean, nearest
from runner.recipe import keys
from runner.runs.record import MISSING, STATUSES, RunRecord

_FILTER = re.compile(r"(?P<key>[A-Za-z_][\w.]*)(?P<sign>!=|>=|<=|=|<|>)(?P<text>.*)", re.DOTALL)
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    **{">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le},
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
TIMES = ("since", "before")


@dataclass(frozen=True)
class Filter:
    """One condition: a key of a run, a sign, and the values of which one is to match."""

    key: str
    sign: str
    values: tuple[str, ...]

    def matches(self, run: RunRecord) -> bool:
        """Return whether a run fulfills the condition; one that lacks the key does not."""
        if self.key in TIMES:
            started = run.started >= _moment(self.values[0])
            return started if self.key == "since" else not started
        found = self.of(run)
        if found is MISSING:
            return False
        if self.sign in ORDERS:
            left, right = _number(found), _number(self.values[0])
            return left is not None and right is not None and ORDERS[self.sign](left, right)
        same = any(_same(found, value) for value in self.values)
        return same == (self.sign == "=")

    def of(self, run: RunRecord) -> Any:
        """Return the value of a run that is compared."""
        field = FIELDS.get(self.key)
        return run.value(self.key) if field is None else field(run)


def parse(words: Sequence[str]) -> list[Filter]:
    """Return the filters that words of a command line are.

    Raises:
        ConfigError: naming every word that is none.
    """
    found, problems = [], Problems()
    for word in words:
        match = _FILTER.fullmatch(word)
        if match is None:
            remedy = "Write key=value, as status=failed, tag=x, since=2d or optimizer.lr=0.01."
            problems.add(word, "it is neither a folder nor a filter", remedy)
            continue
        one = Filter(match["key"], match["sign"], tuple(match["text"].split(",")))
        problems += _problems(one, word)
        found.append(one)
    problems.raise_if()
    return found


def _problems(one: Filter, word: str) -> list[Problem]:
    if one.values[0].startswith(("=", "<", ">")):
        return [Problem(word, "a sign is one of = != < <= > >=", f"Write {one.key}=… .")]
    if one.key in TIMES:
        try:
            _moment(one.values[0])
        except ValueError:
            rule = "a time is an age such as 30m, 2d or 1w, or a date such as 2026-11-24"
            return [Problem(word, rule, f"Write {one.key}=2d.")]
        if one.sign != "=":
            return [Problem(word, "it is a time from or until which", f"Write {one.key}=2d.")]
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
    for name in names:
        if name in FIELDS or name in TIMES or any(run.value(name) is not MISSING for run in runs):
            continue
        known = set(keys.typed_keys())
        if name not in known:
            known |= {".".join(key) for run in runs for key, _ in leaves(run.recipe)}
            rule = "neither a run nor a recipe has such a key"
            near = closest(name, [*FIELDS, *TIMES, *sorted(known)])
            remedy = did_you_mean(near) if near else keys.suggestion(name, sorted(known))
            problems.append(Problem(name, rule, remedy))
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
    if isinstance(found, bool) or found is None:
        return bool(_parsed(wanted) is found)
    left, right = _number(found), _number(wanted)
    if left is not None and right is not None:
        return left == right
    return fnmatch.fnmatchcase(str(found), wanted)


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _moment(text: str) -> float:
    """Return the time that an age or a date means, in seconds since the epoch; else ValueError."""
    match = _AGE.fullmatch(text)
    if match is not None:
        return time.time() - float(match[1]) * UNITS[match[2]]
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y%m%d-%H%M%S"):
        try:
            return time.mktime(time.strptime(text, form))
        except ValueError:
            continue
    raise ValueError(text)
