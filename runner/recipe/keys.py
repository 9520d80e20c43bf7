"""The keys of a recipe: which exist, which one a person meant, and the keys of the engine's errors.

Free of torch.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accel.machine.errors import (
    CheckpointError,
    ConfigError,
    Problem,
    closest,
    did_you_mean,
)
from runner.recipe import foreign_names
from runner.recipe.schema import Recipe

_NODES: dict[type, dict[str, type | None]] = {}  # cache of `nodes`
UNKNOWN = "a recipe has no such key"
# Nodes that name a factory: their other keys are its arguments, checked against its signature.
FACTORY_NODES = ("step", "model", "data", "objective", "optimizer", "scheduler")

COMMANDS = ("eval", "predict", "list", "show", "compare", "report", "again", "submit")


def nodes(kind: type[Any]) -> Mapping[str, type | None]:
    """Return by field name the dataclass of each nested node of `kind`; None for a plain value."""
    if kind not in _NODES:
        hints = typing.get_type_hints(kind)
        _NODES[kind] = {f.name: _dataclass_in(hints[f.name]) for f in dataclasses.fields(kind)}
    return _NODES[kind]


def _dataclass_in(hint: object) -> type | None:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if isinstance(hint, types.UnionType):
        return next((found for part in hint.__args__ if (found := _dataclass_in(part))), None)
    return None


def is_free(key: str) -> bool:
    """Return whether a dotted key lies in a mapping that the schema leaves open.

    Such keys (arguments of factories, options passed to torch) may be set without a ``+``.
    """
    kind: type | None = Recipe
    for part in key.split("."):
        if kind is None:
            return True
        known = nodes(kind)
        if part not in known:
            return False
        kind = known[part]
    return False


def names_factory(key: str) -> bool:
    """Return whether the node at a dotted key names a factory: model, …, callbacks.<x>."""
    head, _, name = key.partition(".")
    return key in FACTORY_NODES or (head == "callbacks" and bool(name) and "." not in name)


def node_of(key: str) -> type | None:
    """Return the dataclass of the node at a dotted key; None for a plain value or no key at all."""
    kind: type | None = Recipe
    for part in key.split("."):
        kind = nodes(kind).get(part) if kind is not None else None
    return kind


def hint_of(key: str) -> object:
    """Return the type of the field at a dotted key of the schema; None if there is none."""
    parent, _, leaf = key.rpartition(".")
    kind = node_of(parent) if parent else Recipe
    return typing.get_type_hints(kind).get(leaf) if kind is not None else None


def is_switch(key: str) -> bool:
    """Return whether a dotted key of the schema is true or false."""
    return hint_of(key) in (bool, bool | None)


def typed_keys(kind: type = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema, nodes included."""
    for name, inner in nodes(kind).items():
        yield prefix + name
        if inner is not None:
            yield from typed_keys(inner, f"{prefix}{name}.")


def known_keys(recipe: Mapping[str, object]) -> list[str]:
    """Return the keys of the schema and those of a composed recipe, dotted."""
    return sorted({*typed_keys(), *keys_of(recipe)})


def keys_of(node: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings, nodes included."""
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{name}.")


def unknown_key(key: str, known: Sequence[str], value: str = "") -> Problem:
    """Return the problem that no recipe has `key`, with the key that was probably meant."""
    return Problem(f"{key}{value}", UNKNOWN, suggestion(key, known))


def suggestion(key: str, known: Sequence[str]) -> str:
    """Return the sentence that names the likeliest of the dotted keys `known`."""
    habit = foreign_names.remedy(key, known)
    if habit is not None:
        return habit
    parent, _, leaf = key.rpartition(".")
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    longer = [k for k in known if k.startswith(parent) and k.endswith(f"_{leaf}")]
    corrected = _corrected(key, known)
    for candidates in (longer, corrected, same_leaf) if parent else (same_leaf, longer, corrected):
        if candidates:
            return did_you_mean(*candidates[:3])
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    place = f"The keys of {parent}" if parent else "The keys"
    return f"{place}: {', '.join(_children(parent, known))}."


def _children(parent: str, known: Sequence[str]) -> list[str]:
    return [leaf for head, _, leaf in (k.rpartition(".") for k in known) if head == parent]


def _corrected(key: str, known: Sequence[str]) -> list[str]:
    """Return `key` with each mistyped part replaced by the nearest one; [] if a part has none."""
    corrected = ""
    for part in key.split("."):
        close = part
        if not corrected or not is_free(f"{corrected}.{part}"):
            names = _children(corrected, known)
            found = part if part in names else closest(part, names)
            if found is None:
                return []
            close = found
        corrected = f"{corrected}.{close}" if corrected else close
    return [corrected]


def switched_off(key: str, recipe: Mapping[str, object]) -> str | None:
    """Return the node above `key` that is null in `recipe`, or None if there is none."""
    parts = key.split(".")
    node: object = recipe
    for depth, part in enumerate(parts[:-1], start=1):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
        if node is None:
            return ".".join(parts[:depth])
    return None


# -- words in another grammar --------------------------------------------------------------


def key_for(name: str) -> str | None:
    """Return the key that a flag or a bare word stands for, or None."""
    name = name.lstrip("-").replace("-", "_").rstrip(":=")
    typed = list(typed_keys())
    head = name.partition(".")[0]
    if name in typed or ("." in name and head in (*FACTORY_NODES, "callbacks")):
        return name
    if (key := foreign_names.renamed(name)) is not None:
        return key
    same_leaf = [key for key in typed if key.rpartition(".")[2] == name]
    return same_leaf[0] if len(same_leaf) == 1 else None


# -- errors of the engine ------------------------------------------------------------------


@contextmanager
def of_the_recipe() -> Iterator[None]:
    """Raise errors of the engine from inside the context with keys of the recipe."""
    try:
        yield
    except CheckpointError as error:
        message = in_keys(str(error))
        if message == str(error):
            raise
        raise type(error)(message) from error
    except ConfigError as error:
        problems = [
            Problem(*map(in_keys, (problem.value, problem.rule, problem.remedy)))
            for problem in error.problems
        ]
        if problems == list(error.problems):
            raise
        raise type(error)(*problems) from error


def in_keys(text: str) -> str:
    """Return a text with ``fsdp.x=1`` for ``FullyShardedDataParallelPlugin(x=1)``, and the like."""
    kinds = ((node_of(key), key) for key in typed_keys())
    for kind, key in kinds:
        if kind is not None:
            text = re.sub(rf"\b{kind.__name__}\.(?=[a-z])", f"{key}.", text)
            text = re.sub(rf"\b{kind.__name__}\((\w+=[^(),]*)\)", rf"{key}.\1", text)
    return re.sub(r"\bmixed_precision='(\w+)'", r"precision=\1", text)
