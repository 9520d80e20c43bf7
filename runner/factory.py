"""A node of a recipe that names a factory: which one, with what, and whether that fits it.

Free of torch until a factory is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel.errors import ConfigError, Problem
from runner import blame, signatures, trust
from runner.keys import FACTORY_NODES
from runner.registry import Registry, register
from runner.schema import Recipe

# How many arguments the runner gives first: to a factory called by name, and to a `_target_`.
NUM_GIVEN = {"optimizer": (1, 1), "scheduler": (2, 1)}


@dataclass(frozen=True)
class Factory:
    """What a node of a recipe names, and what it gives to it.

    Attributes:
        key: the node.
        label: what the factory is called in messages.
        by_name: whether it comes from the registry.
        function: the factory.
        arguments: by name, as plain containers.
    """

    key: str
    label: str
    by_name: bool
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_given(self) -> int:
        """How many first arguments the runner gives."""
        return num_given(self.key, self.by_name)

    def problems(self, given: tuple[str, ...] = ()) -> list[Problem]:
        """Return what is wrong with the arguments."""
        signature = signatures.read(self.function, self.num_given, given)
        wrong = signatures.check(signature, self.arguments, self.key, self.label)
        return [*wrong, *_distrusted(self.arguments, self.key)]

    @property
    def place(self) -> str:
        """How the recipe names the factory."""
        return f"{self.key}.name={self.label}" if self.by_name else f"{self.key}: {self.label}"

    @property
    def has_targets(self) -> bool:
        """Whether there are `_target_`s in the arguments."""
        return next(_targets(self.arguments, self.key), None) is not None

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the factory: with what the runner gives first, then the arguments of the recipe.

        Raises:
            ConfigError: if a value is refused, or the factory returns what the node is not for.
        """
        from runner import produced

        with blame.of_factory(self.key, self.place, self.arguments):
            made = self.function(*given, **named, **self._instantiated())
        produced.check(self.key, self.place, made)
        return made

    def _instantiated(self) -> dict[str, Any]:
        if not self.has_targets:
            return dict(self.arguments)
        from hydra.utils import instantiate

        ConfigError.raise_if(_distrusted(self.arguments, self.key))
        return dict(instantiate(dict(self.arguments), _convert_="all"))


def nodes_of(recipe: Recipe, problems: list[Problem]) -> Iterator[tuple[str, Any, Registry]]:
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


def _named(node: Any, name: str) -> Any:
    """Return a callback's node; where it names no factory, it is the one called as the node is."""
    if isinstance(node, Mapping) and not {"name", "_target_"} & set(node):
        return {"name": name, **node}
    return node


def factory_of(key: str, node: Any, registry: Registry) -> Factory:
    """Return the factory that a node names.

    Raises:
        ConfigError: if there is none, or it is not trusted.
    """
    name, target, arguments = named(key, node, registry)
    if target is not None:
        label = str(target).rpartition(".")[2]
        return Factory(key, label, False, trust.resolve(str(target), f"{key}._target_"), arguments)
    try:
        return Factory(key, str(name), True, registry.get(str(name)), arguments)
    except ConfigError as error:
        raise under(error, registry.kind, key) from error


def named(key: str, node: Any, registry: Registry) -> tuple[Any, str | None, dict[str, Any]]:
    """Return the name or the `_target_` of a node, one of them None, and its arguments.

    Raises:
        ConfigError: if it has neither, or both.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(
            Problem(
                f"{key}={node!r}", "it names a factory", f"Write {key}.name={node}, or {key}=null."
            )
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
        raise ConfigError(
            Problem(f"{key}={dict(node)}", rule, f"Set {key}.name to one of: {known}.")
        )
    return name, None if target is None else str(target), arguments


def num_given(key: str, by_name: bool) -> int:
    """Return how many first arguments the runner gives to the factory of a node."""
    from_registry, by_target = NUM_GIVEN.get(key, (0, 0))
    return from_registry if by_name else by_target


def under(error: ConfigError, kind: str, key: str) -> ConfigError:
    """Return the error with the node's own key in place of the kind of factory."""
    return ConfigError(
        *(
            Problem(
                problem.value.replace(f"{kind}.name", f"{key}.name"), problem.rule, problem.remedy
            )
            for problem in error.problems
        )
    )


def _targets(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, dotted name) of each `_target_` in nested arguments."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield f"{key}._target_", str(value["_target_"])
        for name, item in value.items():
            yield from _targets(item, f"{key}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _targets(item, f"{key}[{index}]")


def _distrusted(arguments: Mapping[str, Any], key: str) -> list[Problem]:
    """Return what is wrong with the `_target_`s in nested arguments."""
    problems: list[Problem] = []
    for place, name in _targets(arguments, key):
        try:
            trust.resolve(name, place)
        except ConfigError as error:
            problems += error.problems
    return problems
