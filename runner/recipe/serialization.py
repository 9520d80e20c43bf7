"""A recipe as an object, as plain containers and as YAML; how two of them differ. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel.config.checks import FieldDefaults
from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe import factory, facts, keys, trust
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
# Nodes whose arguments may wait for facts of the data.
LATE = (*(name for name in keys.FACTORY_NODES if name != "data"), *keys.NAMED_NODES)
NOT_LATE = f"only arguments of {', '.join(LATE)} wait for the facts that the data tells"


@functools.cache
def typed() -> DictConfig:
    """Return the schema as OmegaConf checks it, with enumerations as the words that YAML has.

    It is open: arguments of factories and `_target_` need no ``+``, and unknown keys are reported
    after composing, all at once. It is not to be changed.
    """
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver(facts.RESOLVER, facts.word, replace=True)
    node: DictConfig = OmegaConf.structured(Recipe)
    for name in (*keys.FACTORY_NODES, *keys.NAMED_NODES):
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
    for key, text in facts.late({**plain, **dict.fromkeys(LATE)}):
        problems.append(Problem(f"{key}={text}", NOT_LATE, "Give it a value."))
    for name in {*keys.FACTORY_NODES, *keys.NAMED_NODES} & set(plain):
        empty: Any = {} if name in keys.NAMED_NODES else None  # of a factory, {} is no node
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


# -- two recipes ---------------------------------------------------------------------------

# These say when one invocation stops; a resumed run does not inherit them.
PER_INVOCATION = (("resume",), ("run_dir",), ("trainer", "stop_after"), ("trainer", "max_time"))
# How far a run goes. They may change from one invocation to the next, also of a finished run.
LIMITS = (*PER_INVOCATION, ("trainer", "epochs"), ("trainer", "max_steps"))
# How a run is watched, and how often it is saved: no bit of its result.
WATCHED = (
    *(("trainer", "hang_timeout"), ("trainer", "log_every")),
    *(("trainer", "stop_on_nan"), ("trainer", "detect_anomaly")),
    *(("checkpoint", "every_steps"), ("checkpoint", "every_epochs"), ("checkpoint", "at_end")),
    *(("checkpoint", "every_time"), ("checkpoint", "keep_every"), ("checkpoint", "weights_only")),
    ("checkpoint", "project", "total_limit"),
)
# Where a run is computed and told: nothing of what it computes.
ELSEWHERE = (
    *WATCHED,
    *(("name",), ("output_dir",), ("tags",), ("distributed",), ("tracker",), ("profile",)),
    ("submit",),
    *(("dataloader", "num_workers"), ("dataloader", "pin_memory")),
    *(("dataloader", "prefetch_factor"), ("dataloader", "persistent_workers")),
)
# What changes nothing of what a run computes: of which session, where, and with which folders.
NO_CHANGE = (*PER_INVOCATION, *ELSEWHERE, ("checkpoint", "project"))
# What makes no other run of it for `resume=auto`: that, and how far it goes.
SAME_RUN = (*LIMITS, *ELSEWHERE)


NEW_RUN = "Leave it out, or start a new run."
_PLACE = ("the run stays where it is ({key}={before})", "Leave {key} out.")
_ORDER = (
    "the order of the data and every random draw of a run follow from it ({key}={before})",
    NEW_RUN,
)
_STATE = ("the checkpoint holds the state of {before}, which fits nothing else", NEW_RUN)
# The rule and the remedy of what cannot change when a run is resumed; `before`: what the run has.
# Any other override holds from the next optimizer step on. A schedule then is as if it had held
# from the first step; whether a model or data fits is found as they are loaded.
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("name", "output_dir"), _PLACE),
    "run_dir": ("the run stays where it is", "Leave run_dir out."),
    **dict.fromkeys(("seed", "dataloader.use_seedable_sampler", "dataloader.data_seed"), _ORDER),
    **dict.fromkeys(
        ("init_from", "init_from.path"),
        ("a resumed run has the weights of its checkpoint", NEW_RUN),
    ),
    "precision.scaler.init_scale": (
        "the gradient scale goes on from the checkpoint",
        "Leave it out; growth_factor, backoff_factor and growth_interval may change.",
    ),
    **dict.fromkeys(("step.name", "step._target_", "optimizer.name", "optimizer._target_"), _STATE),
    "checkpoint.project.project_dir": (
        "the run's checkpoints lie where they are ({before})",
        "Leave it out.",
    ),
}


def refusals(frozen: Mapping[str, object], changed: Mapping[str, object]) -> list[Problem]:
    """Return the problems of what a resumed run changes in its recipe and cannot."""
    problems = Problems()
    changes = differences(frozen, changed)
    # A scaler that the run has not had begins as the recipe says.
    fresh = "precision.scaler." if any(key == "precision.mode" for key, *_ in changes) else None
    for key, before, after in changes:
        found = REFUSED.get(key)
        if found is not None and not (fresh and key.startswith(fresh)):
            rule, remedy = (text.format(key=key, before=before) for text in found)
            problems.add(f"{key}={after} with resume", rule, remedy)
    return problems


def absolute(path: str | None, cwd: str | os.PathLike[str]) -> str | None:
    """Return the absolute path of a folder that a recipe names, seen from `cwd`; None stays."""
    return None if path is None else os.path.abspath(os.path.join(cwd, os.path.expanduser(path)))


def same_places(there: object, cwd: str, here: object) -> Any:
    """Return `here` with each folder that is the same one as in `there` written as there.

    Relative folders of `there` are seen from `cwd`, those of `here` from the working directory.
    """
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        result = dict(here)
        for key in ("output_dir", "project_dir", "logging_dir", "checkpoint", "project"):
            if key in there and key in here:
                result[key] = same_places(there[key], cwd, here[key])
        return result
    if not isinstance(there, str) or not isinstance(here, str):
        return here
    return there if absolute(there, cwd) == absolute(here, os.getcwd()) else here


def without_limits(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe as plain containers with the keys of one invocation set to null."""
    result = dict(recipe)
    for *parents, key in PER_INVOCATION:
        node = result
        for parent in parents:
            node[parent] = dict(node[parent])
            node = node[parent]
        node[key] = None
    return result


def differences(
    there: object, here: object, but_for: Sequence[tuple[str, ...]] = (), key: tuple[str, ...] = ()
) -> list[tuple[str, object, object]]:
    """Return (dotted key, value there, value here) of what two recipes do not have in common.

    They are plain containers, or the parts of recipes at `key`. Keys of `but_for`, and everything
    below them, do not count, nor do values here that wait for a fact: the one there is recorded.
    """
    if there == here or key in but_for or facts.is_late(here):
        return []
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [(".".join(key), there, here)]
    found = []
    for name in [*there, *(name for name in here if name not in there)]:
        found += differences(there.get(name), here.get(name), but_for, (*key, str(name)))
    return found
