"""A recipe as an object, as plain containers and as YAML. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel.config.checks import FieldDefaults
from accel.machine.errors import ConfigError, Problem
from runner.recipe import factory, keys, trust
from runner.recipe.schema import PLUGINS, Recipe

if TYPE_CHECKING:
    from omegaconf import DictConfig

Node = TypeVar("Node")

# Keys whose dotted name a handler or plugin imports: checked for trust before that.
CALLABLES = (
    "profile.on_trace_ready",
    "precision.fp8_torchao.module_filter_func",
    *(f"{name}.{field}" for name, plugin in PLUGINS.items() for field in plugin.callables),
)


@functools.cache
def typed() -> DictConfig:
    """Return the schema as OmegaConf checks it, with enumerations as the words that YAML has.

    It is open: arguments of factories and `_target_` need no ``+``, and unknown keys are reported
    after composing, all at once. It is not to be changed.
    """
    from omegaconf import OmegaConf

    node: DictConfig = OmegaConf.structured(Recipe)
    for name in (*keys.FACTORY_NODES, "callbacks"):
        node[name] = {}
    _open(node)
    return node


def _open(node: DictConfig) -> None:
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_struct(node, False)
    for name in node if not node._is_none() else ():
        value = node._get_node(name)
        if isinstance(value, DictConfig):
            _open(value)
        elif not OmegaConf.is_missing(node, name) and isinstance(node[name], Enum):
            node[name] = node[name].value


def from_plain(plain: Mapping[str, object]) -> Recipe:
    """Build a recipe from plain containers whose types are right; missing keys take the defaults.

    Raises:
        ConfigError: naming every unknown key and every value that is not allowed.
    """
    recipe, problems = examine(plain)
    ConfigError.raise_if(problems)
    return recipe


def examine(plain: Mapping[str, object]) -> tuple[Recipe, list[Problem]]:
    """Build a recipe, with defaults for nodes that have problems, and return those, too."""
    distrusted = {key: wrong for key in CALLABLES if (wrong := _distrust(plain, key)) is not None}
    problems = list(distrusted.values())
    dropped = {key.partition(".")[0] for key in distrusted}
    plain = {key: value for key, value in plain.items() if key not in dropped}
    recipe = _node(Recipe, plain, "", problems, keys.known_keys(plain))
    for name in {*keys.FACTORY_NODES, "callbacks"} & set(plain):
        empty: Any = {} if name == "callbacks" else None  # of a factory, {} is no node
        setattr(recipe, name, plain[name] or empty)
    return recipe, problems


def _distrust(plain: Mapping[str, object], key: str) -> Problem | None:
    node: object = plain
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    try:
        if isinstance(node, str) and "." in node:  # else a choice, or no dotted name at all
            trust.resolve(node, key)
    except ConfigError as error:
        return error.problems[0]
    return None


def _node(
    kind: type[Node],
    values: Mapping[str, object],
    prefix: str,
    problems: list[Problem],
    known: list[str],
) -> Node:
    """Build one node; on problems, add them to `problems` and return the default."""
    arguments: dict[str, Any] = {}
    made = _class_of(kind, values.get("_target_"), prefix, problems)
    inner = keys.nodes(made)
    for name, value in values.items():
        nested = inner.get(name)
        if name == "_target_":
            continue
        if name not in inner:
            key = f"{prefix}{name}"
            valid = [k for k in known if k != key and not k.startswith(f"{key}.")]
            valid += [f"{prefix}{field}" for field in inner]
            problems += [keys.unknown_key(k, valid, f"={v}") for k, v in _leaves(key, value)]
        elif nested is not None and isinstance(value, Mapping):
            arguments[name] = _node(nested, value, f"{prefix}{name}.", problems, known)
        else:
            arguments[name] = value
    try:
        with keys.of_the_recipe():
            return made(**arguments)
    except ConfigError as error:
        problems += error.problems
        fallback = kind()
        for name in [name for name in arguments if inner[name] and name in keys.nodes(kind)]:
            setattr(fallback, name, arguments[name])
        return fallback


def _class_of(kind: type[Node], target: object, prefix: str, problems: list[Problem]) -> type[Node]:
    """Return the class of a node: `kind`, or a trusted subclass that `_target_` names."""
    if target is None:
        return kind
    try:
        found = trust.resolve(str(target), f"{prefix}_target_", subclass_of=kind)
    except ConfigError as error:
        problems += error.problems
        return kind
    assert isinstance(found, type)
    return found


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of a value that is no mapping, and of each one in a mapping."""
    if not (isinstance(value, Mapping) and value):
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


def to_plain(value: Any) -> Any:
    """Return a recipe, or a part of one, as dicts, lists and scalars: what was given, no more."""
    if isinstance(value, FieldDefaults):
        return {**_target_of(type(value)), **to_plain(value.given_fields())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {**_target_of(type(value)), **plain}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value


def _target_of(kind: type) -> dict[str, str]:
    """Return the `_target_` of a node whose class is not the schema's own."""
    own = kind in _schema_classes()
    return {} if own else {"_target_": f"{kind.__module__}.{kind.__qualname__}"}


@functools.cache
def _schema_classes() -> frozenset[type | None]:
    return frozenset((Recipe, *map(keys.node_of, keys.typed_keys())))


def frozen_plain(recipe: Recipe) -> dict[str, object]:
    """Return a recipe as it is frozen with a run.

    It holds all arguments, also those at a factory's default, which imports it.

    The content of a file that a plugin names goes into it: the file may change, and the run may
    be resumed from another directory, where strategies that it does not use may not be installed.
    """
    off = PLUGINS.keys() - recipe.plugins.keys()
    whole = to_plain(factory.completed(recipe))
    plain = {key: node for key, node in whole.items() if key not in off}
    for name, plugin in recipe.plugins.items():
        fields = PLUGINS[name].frozen_fields
        if fields is not None:
            plain[name] |= to_plain(fields(plugin))
    return plain


def yaml_text(plain: dict[str, object] | list[str]) -> str:
    """Return plain containers as YAML that reads back as the same."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.create(plain)))


def parse_yaml(text: str, path: Path) -> dict[str, object]:
    """Return a frozen recipe as plain containers, checked against the types of the schema.

    Raises:
        ConfigError: if it is no recipe.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        found = OmegaConf.create(text)
        if not found:  # `null` or {}: with the defaults it would be a user's recipe
            raise ValueError("it has no keys")
        merged = OmegaConf.merge(typed(), found)
        return dict(to_plain(OmegaConf.to_container(merged, resolve=True)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        remedy = "Correct the file, or name another run."
        rule = f"it is not the recipe of a run: {reason}"
        raise ConfigError.of(str(path), rule, remedy) from error
