"""The keys in which runs differ: those that were swept, a group as its choice (`optimizer: sgd`).

What differs only as a consequence of a swept group (`optimizer.betas`) is no key of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.recipe import resumed_recipe
from runner.reporting.filters import leaves
from runner.runs.json_files import JsonObject, finite
from runner.runs.record import CODE, MISSING, RunRecord

SEED = "seed"
# Keys of a recipe that change nothing of what a run computes, and how fast it is, neither.
NO_CAUSE = ("name", "output_dir", "tags", "resume", "run_dir", "tracker", "profile", "submit")
# Of the other keys that `resume=auto` ignores, those that are worth a look on their own.
SPEED = (("distributed", "num_processes"), ("dataloader",))
# Of overrides: what they set is of no recipe.
COMMANDS = ("hydra", "sweep")


def find(runs: Sequence[RunRecord]) -> list[str]:
    """Return the dotted keys and the groups in which runs differ, the seed not among them.

    Of the jobs of one sweep they are the keys that the sweep has set. Of other runs, they are the
    keys in which the recipes differ, and in place of what lies in a group that each of them has
    chosen, the group. Where the runs were made by different code, the key `CODE` is one of them.

    Keys that only say where a run is computed do not count. How many processes and workers there
    are counts where nothing else differs.
    """
    recipes = [_flat(run) for run in runs]
    names = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    differing = [name for name in names if _differ([r.get(name, MISSING) for r in recipes])]
    given = list(dict.fromkeys(key for run in _by_directory(runs) for key in _causes(run)))
    own = [key for key in given if _differ([value(run, key) for run in runs])]
    is_sweep = _is_one_sweep(runs)
    if not is_sweep:
        own = [key for key in own if all(_is_choice(run, key) for run in runs)]
    follows = [
        name
        for name in differing
        if name not in given
        and (is_sweep or any(f"{name}.".startswith(f"{_node(key)}.") for key in own))
        and _follows(name, own, runs, recipes)
    ]
    rest = [name for name in differing if name not in own and name not in follows]
    found = _in_order([*own, *rest], names)
    causes = [name for name in found if not _lies_in(name, resumed_recipe.ELSEWHERE)]
    causes += [CODE] if len({run.code for run in runs}) > 1 else []
    return causes or [name for name in found if _lies_in(name, SPEED)]


def value(run: RunRecord, key: str) -> Any:
    """Return a run's value of a key that `find` has returned; of a group, the name of its choice.

    `MISSING` where its recipe has no such key, or the run has not chosen of the group.
    """
    found, text = run.value(key), _overrides(run).get(key, "")
    if not _is_node(found) or text.startswith("{"):
        return found
    return text or MISSING


def as_text(run: RunRecord, key: str) -> str:
    """Return a run's value of a key in a form in which equal values are equal texts."""
    return _hashed(value(run, key))


def vary(keys: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return those of the keys that have not one value in all of the runs."""
    return [key for key in keys if _differ([value(run, key) for run in runs])]


def _overrides(run: RunRecord) -> dict[str, str]:
    """Return the texts that a run's command has set, by key or group; `~key` sets nothing."""
    given = run.job.get("overrides") or run.journal.get("overrides") or ()
    parts = [str(one).lstrip("+").partition("=") for one in given if not str(one).startswith("~")]
    return {key: text for key, _, text in parts}


def _causes(run: RunRecord) -> Iterator[str]:
    for key in _overrides(run):
        first = key.replace("/", ".").partition(".")[0]
        if key != SEED and first not in (*NO_CAUSE, *COMMANDS):
            yield key


def _is_node(found: Any) -> bool:
    """Return whether a value is of a group: what its file has, or nothing of that name."""
    return found is MISSING or (isinstance(found, Mapping) and bool(found))


def _is_choice(run: RunRecord, key: str) -> bool:
    """Return whether a run's command has chosen of a group; `null` is a choice."""
    text = _overrides(run).get(key, "{")
    return not text.startswith("{") and (text == "null" or _is_node(run.value(key)))


def _node(group: str) -> str:
    """Return the dotted key of what a group's file sets: `b` of `a/x@b`, else its own name."""
    return group.rpartition("@")[2].replace("/", ".")


def _follows(
    name: str, own: Sequence[str], runs: Sequence[RunRecord], recipes: Sequence[JsonObject]
) -> bool:
    """Return whether runs that are equal in `own` are equal in a key, too."""
    found: dict[tuple[str, ...], str] = {}
    for run, recipe in zip(runs, recipes, strict=True):
        text = _hashed(recipe.get(name, MISSING))
        if found.setdefault(tuple(as_text(run, key) for key in own), text) != text:
            return False
    return True


def _is_one_sweep(runs: Sequence[RunRecord]) -> bool:
    folders = {run.path.parent for run in runs}
    return len(folders) == 1 and all(run.sweep is not None and _overrides(run) for run in runs)


def _by_directory(runs: Sequence[RunRecord]) -> list[RunRecord]:
    return sorted(runs, key=lambda run: str(run.path))


def _in_order(keys: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return keys in the order of the recipe, groups before what lies in them."""
    places: dict[str, int] = {}
    for number, name in enumerate(names):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            places.setdefault(".".join(parts[:end]), number)
    return sorted(keys, key=lambda key: (places.get(_node(key), -1), key.count(".")))


def _lies_in(name: str, keys: Sequence[tuple[str, ...]]) -> bool:
    parts = tuple(name.split("."))
    return any(parts[: len(key)] == key for key in keys)


def _flat(run: RunRecord) -> JsonObject:
    found = {".".join(key): value for key, value in leaves(run.recipe)}
    return {
        key: value
        for key, value in found.items()
        if key != SEED and key.partition(".")[0] not in NO_CAUSE
    }


def _differ(values: Sequence[Any]) -> bool:
    return len({_hashed(value) for value in values}) > 1


def _hashed(value: Any) -> str:
    return "" if value is MISSING else json.dumps(finite(value), sort_keys=True, default=str)
