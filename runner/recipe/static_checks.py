"""Factories' names and arguments, checked from source text: nothing is imported. Free of torch.

Anything that text does not determine (names made at run time, decorators, packages that are not
installed) is left to `build.parts.check_factories`, which imports.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from accel.machine.errors import ConfigError, Problem
from runner.recipe import factory_nodes as nodes
from runner.recipe import signatures, source_text, trust
from runner.recipe.registry import Registry
from runner.recipe.schema import Recipe
from runner.recipe.signatures import Signature
from runner.recipe.source_text import Module

TYPES: dict[str, object] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict)},
    **{"None": None, "Sequence": Sequence, "Mapping": Mapping, "Callable": Callable, "Any": Any},
    **{"Optional": typing.Optional, "Union": typing.Union, "Literal": typing.Literal},
}
HOMES = ("builtins", "typing", "collections.abc")
UNKNOWN = object()


def problems(recipe: Recipe) -> list[Problem]:
    """Return the problems of the names and arguments of a recipe's factories."""
    found: list[Problem] = []
    for key, node, registry in nodes.nodes_of(recipe, found):
        try:
            found += _problems(recipe, key, node, registry)
        except ConfigError as error:
            found += nodes.with_node_key(error, registry.kind, key).problems
    return found


def unknown(recipe: Recipe) -> bool:
    """Return whether a recipe names factories that are not registered so far."""
    return any(
        isinstance(node, Mapping) and node.get("name") not in (None, *registry.names())
        for _, node, registry in nodes.nodes_of(recipe, [])
    )


def _problems(recipe: Recipe, key: str, node: object, registry: Registry) -> list[Problem]:
    name, target, arguments = nodes.name_and_arguments(key, node, registry)
    if target is not None:
        distrusted = trust.distrust(target, f"{key}._target_")
        if distrusted is not None:
            return [distrusted]
        label, place = target.rpartition(".")[2], target
    else:
        registry.require(str(name))
        label, place = str(name), registry.built_in(str(name)) or ""
    signature = signature_of(place.replace(":", "."), nodes.num_given(key, target is None))
    if signature is None:
        return []
    if key != "step":
        return signatures.check(signature, arguments, key, label)
    rest = {n: p for n, p in signature.parameters.items() if n not in nodes.STEP_PARTS}
    own = Signature(rest, signature.open, signature.hints)
    wrong = signatures.check(own, arguments, key, label)
    return [*wrong, *nodes.step_problems(recipe, label, signature)]


def arguments_of(registry: Registry, name: str, key: str) -> list[str]:
    """Return the names of the arguments that a recipe may give to a factory, as far as known."""
    place = registry.built_in(name)
    if place is None and name in registry.names():
        return list(signatures.read(registry.get(name), nodes.num_given(key, True)).parameters)
    found = signature_of((place or "").replace(":", "."), nodes.num_given(key, True))
    return [] if found is None else list(found.parameters)


@cache
def signature_of(dotted: str, num_given: int = 0) -> Signature | None:
    """Return the signature of a function or class; None where its text does not determine it."""
    found = source_text.definition(dotted)
    function = None if found is None else source_text.called(*found)
    if found is None or function is None:
        return None
    own = isinstance(found[0], ast.ClassDef)  # `self` is given, too
    return _signature(function, found[1], num_given + own)


def _signature(function: ast.FunctionDef, module: Module, num_given: int) -> Signature:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(named) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = [*zip(named, defaults, strict=True)][num_given:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    positional = {argument.arg for argument in arguments.posonlyargs}
    parameters = {
        argument.arg: inspect.Parameter(
            argument.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is None else _default(default),
        )
        for argument, default in pairs
        if argument.arg not in positional
    }
    hints = {
        argument.arg: hint
        for argument, default in pairs
        if argument.annotation is not None and _default(default) is not UNKNOWN
        for hint in _hint(argument.annotation, module)
    }
    return Signature(parameters, arguments.kwarg is not None, hints)


def _default(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def _hint(annotation: ast.expr, module: Module) -> Iterator[object]:
    """Yield the type that an annotation of plain names stands for; nothing for any other."""
    names = [node for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    known = all(
        node.id in TYPES and module.dotted(node) in {f"{home}.{node.id}" for home in HOMES}
        for node in names
    )
    plain = (ast.Name, ast.Constant, ast.BinOp, ast.BitOr, ast.Subscript, ast.Tuple, ast.Load)
    if known and all(isinstance(node, plain) for node in ast.walk(annotation)):
        try:
            hint = eval(compile(ast.Expression(annotation), "<annotation>", "eval"), dict(TYPES))
        except (TypeError, SyntaxError, ValueError):  # a name in quotes has no `|`, and so on
            return
        yield hint
