"""The factory that a node of a recipe names, checked. Free of torch until a factory is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe import argument_errors, signatures, trust
from runner.recipe.factory_nodes import (
    STEP_PARTS,
    name_and_arguments,
    nodes_of,
    num_given,
    step_problems,
    with_node_key,
)
from runner.recipe.registry import Registry, register
from runner.recipe.schema import Recipe


@dataclass(frozen=True)
class Factory:
    """The factory that the node `key` of a recipe names, and its arguments as plain containers.

    `label` names it in messages; `by_name`: it comes from the registry.
    """

    key: str
    label: str
    by_name: bool
    function: Callable[..., object]
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_given(self) -> int:
        """How many first arguments the runner gives."""
        return num_given(self.key, self.by_name)

    def problems(self, given: tuple[str, ...] = ()) -> list[Problem]:
        """Return the problems of the arguments."""
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

    def __call__(self, *given: object, **named: object) -> Any:
        """Call the factory with the runner's arguments and those of the recipe.

        Raises:
            ConfigError: if a value is refused.
        """
        with argument_errors.factory_errors(self.key, self.place, self.arguments):
            return self.function(*given, **named, **self._instantiated())

    def _instantiated(self) -> dict[str, object]:
        if not self.has_targets:
            return dict(self.arguments)
        from hydra.utils import instantiate

        ConfigError.raise_if(_distrusted(self.arguments, self.key))
        return dict(instantiate(dict(self.arguments), _convert_="all"))


def factory_of(key: str, node: object, registry: Registry) -> Factory:
    """Return the factory that a node names; a ConfigError if it is missing or not trusted."""
    name, target, arguments = name_and_arguments(key, node, registry)
    if target is not None:
        label = str(target).rpartition(".")[2]
        return Factory(key, label, False, trust.resolve(str(target), f"{key}._target_"), arguments)
    try:
        return Factory(key, str(name), True, registry.get(str(name)), arguments)
    except ConfigError as error:
        raise with_node_key(error, registry.kind, key) from error


def check_factories(recipe: Recipe) -> list[Problem]:
    """Return what is wrong with the nodes that name factories."""
    problems = Problems()
    found: dict[str, Factory] = {}
    for key, node, registry in nodes_of(recipe, problems):
        try:
            found[key] = factory_of(key, node, registry)
        except ConfigError as error:
            problems += error.problems
    for key, factory in found.items():
        problems += factory.problems(STEP_PARTS if key == "step" else ())
    for key in ("step", "data"):
        if getattr(recipe, key) is None:
            names = ", ".join(getattr(register, key).names())
            problems.add(f"{key}=null", "a run needs it", f"Choose {key}.name from: {names}.")
    if "step" in found:
        step = found["step"]
        problems += step_problems(recipe, step.label, signatures.read(step.function))
    return problems


def _targets(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, dotted name) of each `_target_` in nested arguments."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield f"{key}._target_", str(value["_target_"])
        for name, item in value.items():
            yield from _targets(item, f"{key}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _targets(item, f"{key}[{index}]")


def _distrusted(arguments: Mapping[str, object], key: str) -> list[Problem]:
    """Return the problems of the `_target_`s in nested arguments."""
    problems: list[Problem] = []
    for place, name in _targets(arguments, key):
        try:
            trust.resolve(name, place)
        except ConfigError as error:
            problems += error.problems
    return problems
