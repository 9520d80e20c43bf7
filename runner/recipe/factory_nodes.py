"""Nodes of a recipe that name a factory, and the parts that a step takes. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accel.machine.errors import ConfigError, Problem
from runner.recipe.keys import FACTORY_NODES
from runner.recipe.registry import Registry, register
from runner.recipe.schema import Recipe
from runner.recipe.signatures import Signature

# How many arguments the runner gives first: to a factory called by name, and to a `_target_`.
NUM_GIVEN = {"optimizer": (1, 1), "scheduler": (2, 1)}
# Parameters of a step's constructor that receive the objects built from these nodes.
STEP_PARTS = ("model", "objective", "optimizer", "scheduler")


def nodes_of(recipe: Recipe, problems: list[Problem]) -> Iterator[tuple[str, object, Registry]]:
    """Yield (key, node, registry) of each node that names a factory and is not null."""
    for key in FACTORY_NODES:
        if getattr(recipe, key) is not None:
            yield key, getattr(recipe, key), getattr(register, key)
    callbacks = recipe.callbacks or {}
    if not isinstance(callbacks, Mapping):
        problems.append(
            Problem(
                f"callbacks={callbacks!r}", "it maps names to factories", "Write callbacks.x.name=…"
            )
        )
        return
    for name, node in callbacks.items():
        if node is not None:
            yield f"callbacks.{name}", _named(node, str(name)), register.callback


def builtin_places(recipe: Recipe) -> Iterator[str]:
    """Yield ``"module:attribute"`` of each built-in factory that a recipe names."""
    for _, node, registry in nodes_of(recipe, []):
        name = node.get("name") if isinstance(node, Mapping) else None
        place = registry.built_in(name) if isinstance(name, str) else None
        if place is not None:
            yield place


def _named(node: object, name: str) -> object:
    """Return a callback's node; where it names no factory, it is the one called as the node is."""
    if isinstance(node, Mapping) and not {"name", "_target_"} & set(node):
        return {"name": name, **node}
    return node


def name_and_arguments(
    key: str, node: object, registry: Registry
) -> tuple[object, str | None, dict[str, object]]:
    """Return name or `_target_` of a node (the other is None) and its arguments, or raise."""
    if not isinstance(node, Mapping):
        raise ConfigError.of(
            f"{key}={node!r}", "it names a factory", f"Write {key}.name={node}, or {key}=null."
        )
    arguments = {
        str(name): value for name, value in node.items() if name not in ("name", "_target_")
    }
    name, target = node.get("name"), node.get("_target_")
    if (name is None) == (target is None):
        rule = "it names a factory by `name` or by `_target_`, not both"
        if name is None:
            rule = "nothing is chosen: it names a factory by `name` or `_target_`"
        known = ", ".join(registry.names())
        raise ConfigError.of(f"{key}={dict(node)}", rule, f"Set {key}.name to one of: {known}.")
    return name, None if target is None else str(target), arguments


def num_given(key: str, by_name: bool) -> int:
    """Return how many first arguments the runner gives to the factory of a node."""
    from_registry, by_target = NUM_GIVEN.get(key, (0, 0))
    return from_registry if by_name else by_target


def with_node_key(error: ConfigError, kind: str, key: str) -> ConfigError:
    """Return the error with the node's own key in place of the kind of factory."""
    return ConfigError(
        *(
            Problem(
                problem.value.replace(f"{kind}.name", f"{key}.name"), problem.rule, problem.remedy
            )
            for problem in error.problems
        )
    )


def step_problems(recipe: Recipe, label: str, signature: Signature) -> Iterator[Problem]:
    """Yield parts that the step needs and lacks, and those that it would not use."""
    for key in STEP_PARTS:
        parameter = signature.parameters.get(key)
        given = getattr(recipe, key) is not None
        if parameter is None and given and not signature.open:
            yield Problem(
                f"{key}={_label(getattr(recipe, key))} with step={label}",
                f"{label} builds its own and takes no {key}",
                f"Set {key}=null.",
            )
        elif parameter is not None and parameter.default is parameter.empty and not given:
            yield Problem(
                f"{key}=null with step={label}",
                f"{label} needs {'an' if key[0] in 'aeiou' else 'a'} {key}",
                f"Choose {key}=…",
            )


def _label(node: object) -> str:
    if isinstance(node, Mapping):
        return str(node.get("name") or node.get("_target_"))
    return str(node)
