"""State dicts of models and optimizers in sharded folders, under the documented names.

A model's tensors are ``model.<name>``; an optimizer's ``optimizer.state.<name>.<state>`` and
``optimizer.param_groups.<number>.<option>``; what else an optimizer's state has is in
``optimizer.accel``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint import serialization
from accel.checkpoint.directory import METADATA, broken, numbered
from accel.checkpoint.optimizer_state import FORMAT_VERSION
from accel.checkpoint.sharded import Allocate, Place, Shards, empty, is_shard
from accel.machine.errors import CheckpointError, Problem

_MODEL = "model."
_PREFIX = "optimizer.accel.prefix"
# Marks a dict or list that torch writes in one piece, as it does all tuples.
_WHOLE = "accel.whole"
_OTHERS = ("format", "other_state", "unnamed", "extra")


def is_sharded(folder: Path) -> bool:
    """Return whether a folder holds sharded state."""
    return (folder / METADATA).is_file()


def nested_model(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a model's state dict as its folder holds it.

    Raise a `CheckpointError` that names `what` for a value that could not be read back.
    """
    own = {name: _undivided(value, f"{what}[{name!r}]") for name, value in state.items()}
    _check(own, what)
    return {"model": own}


def read_model(folder: Path, allocate: Allocate = empty) -> dict[str, Any]:
    """Return the state dict that lies in a model's folder.

    Args:
        folder: with or without the prefix ``model.`` of all names.
        allocate: is given each name as a place of one entry.

    Raises:
        CheckpointError: if the folder is missing or broken.
    """
    shards = Shards(folder)
    # Alone, a name may begin so, too.
    is_nested = all(place[0] == "model" and len(place) > 1 for place in shards.places.values())
    names = {
        place: name.removeprefix(_MODEL) if is_nested else name
        for name, place in shards.places.items()
    }
    found = shards.read(lambda place, size, dtype: allocate((names[place],), size, dtype))
    return {names[place]: _divided(value) for place, value in found}


def nested_optimizer(saved: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the state of `optimizer_state.state_by_name` as an optimizer's folder holds it.

    Where all parameters are of one model, their names are the model's own, as documented.

    Raise a `CheckpointError` that names `what` for a value that could not be read back.
    """
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    models = {key.partition(":")[0] for key in keys}
    prefix = f"{models.pop()}:" if len(models) == 1 and not saved["unnamed"] else ""
    own = {
        "state": {
            key.removeprefix(prefix): _entries(entry, f"{what}['state'][{key!r}]")
            for key, entry in saved["state"].items()
        },
        "param_groups": [
            {
                **_entries(group, f"{what}['param_groups'][{number}]"),
                "params": [key.removeprefix(prefix) for key in group["params"]],
            }
            for number, group in enumerate(saved["param_groups"])
        ],
        "accel": {"prefix": prefix}
        | {name: _undivided(saved[name], f"{what}[{name!r}]") for name in _OTHERS},
    }
    _check(own, what)
    return {"optimizer": own}


def read_optimizer(folder: Path, index: int, allocate: Allocate = empty) -> dict[str, Any]:
    """Return the state in an optimizer's folder as `optimizer_state.state_by_name` gives it.

    Args:
        folder: with a description of its files.
        index: of the optimizer: where another library wrote the folder, its parameters are those of
            the model of that number.
        allocate: is given (key of a parameter, name of its state) as the place.

    Raises:
        CheckpointError: if the folder is missing or broken.
    """
    shards = Shards(folder)
    is_own = _PREFIX in shards.places
    prefix = shards.value(_PREFIX) if is_own else f"{numbered('model', '', index)}:"

    def allocate_state(place: Place, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if place[:2] != ("optimizer", "state"):
            return empty(place, size, dtype)
        return allocate((f"{prefix}{place[2]}", *place[3:]), size, dtype)

    root: dict[Any, Any] = {}
    for place, value in shards.read(allocate_state):
        node = root
        for key in place[:-1]:
            node = node.setdefault(key, {})
        node[place[-1]] = value
    found = _lists(root).get("optimizer")
    if not isinstance(found, dict) or "param_groups" not in found:
        rule = "it holds no state of an optimizer"
        raise broken(folder, rule, "Name the folder that holds optimizer_0.")
    rest = found.get("accel", {})
    return {
        "format": rest.get("format", FORMAT_VERSION),
        "param_groups": [
            {**group, "params": [f"{prefix}{key}" for key in group["params"]]}
            for group in found["param_groups"]
        ],
        "state": {f"{prefix}{key}": entry for key, entry in found.get("state", {}).items()},
        "other_state": rest.get("other_state", {}),
        "unnamed": rest.get("unnamed", []),
        "extra": rest.get("extra", {}),
    }


def _lists(value: Any) -> Any:
    """Return nested dicts with lists in the place of dicts by position."""
    if not isinstance(value, dict):
        return _divided(value)
    entries = {key: _lists(entry) for key, entry in value.items()}
    if entries and all(isinstance(key, int) for key in entries):
        return [entries[key] for key in sorted(entries)]
    return entries


# -- containers ----------------------------------------------------------------------------


def _entries(value: Any, place: str) -> Any:
    """Return a dict whose entries torch writes one by one, each of them undivided."""
    if not isinstance(value, dict) or not value or not _names(value):
        return _undivided(value, place)
    return {key: _undivided(entry, f"{place}[{key!r}]") for key, entry in value.items()}


def _undivided(value: Any, place: str) -> Any:
    """Return a value so that it is read back as it is.

    torch takes dicts and lists apart: keys become strings, and empty dicts are lost. Those without
    shards are marked, and written in one piece.

    Raise a `CheckpointError` that names `place` for shards that could not be read back.
    """
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if not _holds_shards(value):
        is_kept = isinstance(value, tuple) or (
            isinstance(value, list) and not any(map(_opens, value))
        )
        return value if is_kept else (_WHOLE, value)
    if type(value) is list:
        return [_undivided(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, dict) and _names(value):
        return _entries(value, place)
    rule = "shards lie in lists, or in dicts with keys of strings"
    remedy = "Use a list there, or state_dict_type='FULL_STATE_DICT'."
    raise CheckpointError(Problem(f"{place} is a {type(value).__name__}", rule, remedy))


def _divided(value: Any) -> Any:
    """Return what `_undivided` was given, of a value that was written in one piece."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
    return value[1] if is_pair and value[0] == _WHOLE else value


def _names(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _opens(value: Any) -> bool:
    """Return whether torch takes the list apart that a value lies in."""
    return isinstance(value, (Mapping, list, torch.Tensor))


def _holds_shards(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_holds_shards, value.values() if isinstance(value, Mapping) else value))
    return is_shard(value)


def _check(state: Mapping[str, Any], what: str) -> None:
    serialization.refuse_unreadable(_without_tensors(state), what)


def _without_tensors(value: Any) -> Any:
    """Return nested dicts and lists with None in the place of tensors, which all can be written."""
    if isinstance(value, torch.Tensor):
        return None
    value = _divided(value)
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(entry) for key, entry in value.items()}
    return list(map(_without_tensors, value)) if type(value) in (list, tuple) else value
