"""The keys ``sweep.*`` of a command line: how a sweep is run. No part of a job's recipe.

| key | meaning |
|---|---|
| ``sweep.dir=DIR`` | the directory of the sweep itself |
| ``sweep.jobs=N`` or ``auto`` | jobs at once on this machine; auto: as GPUs or CPU cores allow |
| ``sweep.list=FILE`` or ``[[a=1,b=2],[a=3]]`` | the overrides of each job |

A list file is YAML (a list of jobs, each a list of overrides or a mapping of values) or text with
the overrides of a job on each line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

from accel.machine.errors import Problem, Problems, nearest

PREFIX = "sweep"
KEYS = ("dir", "jobs", "list")
AUTO: Literal["auto"] = "auto"
Jobs = int | Literal["auto"]
REMEDIES = {
    "dir": "Give sweep.dir=<a folder>.",
    "jobs": "Give sweep.jobs=auto, or how many jobs run at once.",
    "list": "Give sweep.list=jobs.yaml, or sweep.list=[[a=1,b=2],[a=3]].",
}
# What a file of jobs should have: YAML or JSON, or (True) plain lines.
FILLED = {
    False: "Write a line for each job into it, such as `- [optimizer.lr=0.1, seed=1]`.",
    True: "Write a line for each job into it, such as `optimizer.lr=0.1 seed=1`.",
}


@dataclass(frozen=True)
class Settings:
    """How a sweep is run.

    Args:
        dir: the directory of the sweep; None: ``<output_dir>/<name>/sweep-<time>-<digest>``.
        jobs: jobs at once on this machine; "auto": as many as its GPUs or CPU cores allow.
        list: the overrides of each job; None: the combinations of the swept values.
        list_given: `list` as the command line has it.
    """

    dir: str | None = None
    jobs: Jobs = 1
    list: tuple[tuple[str, ...], ...] | None = None
    list_given: str = ""


def is_setting(override: str) -> bool:
    """Return whether an override is of a key ``sweep.*``."""
    return re.match(rf"[+~]*{PREFIX}([.=]|$)", override) is not None


def take(overrides: Sequence[str]) -> tuple[Settings, list[str]]:
    """Return the settings of a sweep, and the other overrides.

    Raises:
        ConfigError: naming every key that is unknown and every value that is not allowed.
    """
    problems = Problems()
    values: dict[str, str] = {}
    for override in filter(is_setting, overrides):
        key, given, value = override.partition("=")
        name = key.removeprefix(f"{PREFIX}.")
        if name not in KEYS or not given:
            known = [f"{PREFIX}.{name}" for name in KEYS]
            problems.add(
                override, f"the keys of a sweep are {', '.join(known)}", nearest(key, known)
            )
        elif not value.strip("'\" "):
            problems.add(override, "it has a value", REMEDIES[name])
        else:
            values[name] = value.strip("'\"")
    jobs = _jobs(values.get("jobs", "1"), problems)
    listed = _listed(values["list"], problems) if "list" in values else None
    problems.raise_if()
    rest = [override for override in overrides if not is_setting(override)]
    return Settings(values.get("dir"), jobs, listed, values.get("list", "")), rest


def misplaced(overrides: Sequence[str]) -> list[Problem]:
    """Return the problems of settings of a sweep on the command line of a single run."""
    return [
        Problem(override, "sweep.* sets how a sweep runs", "Add -m, or leave it out.")
        for override in overrides
        if is_setting(override)
    ]


def _jobs(value: str, problems: Problems) -> Jobs:
    if value == AUTO:
        return AUTO
    if value.isdecimal() and int(value) >= 1:
        return int(value)
    problems.add(f"sweep.jobs={value}", "it is auto or at least 1", REMEDIES["jobs"])
    return 1


def _listed(value: str, problems: Problems) -> tuple[tuple[str, ...], ...] | None:
    """Return the overrides of each job of ``sweep.list``, which is a file or the list itself."""
    shown = f"sweep.list={value}"
    text, is_text = value, False
    is_file = not value.startswith("[")
    if is_file:
        path = Path(value).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problems.add(shown, f"the file cannot be read ({reason})", REMEDIES["list"])
            return None
        is_text = path.suffix not in (".yaml", ".yml", ".json")
    try:
        jobs = _lines(text) if is_text else _items(_content(text))
    except (YAMLError, ValueError) as error:
        rule = f"it is a list of jobs: {' '.join(str(error).split())}"
        problems.add(shown, rule, REMEDIES["list"])
        return None
    if not jobs:
        rule, remedy = "it has no jobs", REMEDIES["list"]
        if is_file:
            rule = "the file has no jobs" if text.strip() else "the file is empty"
            remedy = FILLED[is_text]
        problems.add(shown, rule, remedy)
    strange = [setting for job in jobs for setting in job if is_setting(setting)]
    for setting in dict.fromkeys(strange):
        problems.add(f"{setting} in {shown}", "it holds for a sweep", "Give it beside sweep.list.")
    return jobs


def _lines(text: str) -> tuple[tuple[str, ...], ...]:
    split = (shlex.split(line, comments=True) for line in text.splitlines())
    return tuple(tuple(words) for words in split if words)


def _content(text: str) -> object:
    """Return what YAML has; an empty file has an empty list."""
    content = safe_load(text)
    return [] if content is None else content


def _items(content: object) -> tuple[tuple[str, ...], ...]:
    if not isinstance(content, list):
        raise ValueError(f"{content!r} is none")
    return tuple(_item(item) for item in content)


def _item(item: object) -> tuple[str, ...]:
    if isinstance(item, str):
        return tuple(shlex.split(item))
    if isinstance(item, Mapping):
        return tuple(f"{key}={_value(value)}" for key, value in item.items())
    if isinstance(item, list) and all(isinstance(one, str) for one in item):
        return tuple(item)
    raise ValueError(f"{item!r} is neither a list of overrides nor a mapping of values")


def _value(value: object) -> str:
    """Return a YAML value as an override has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return str(value)
