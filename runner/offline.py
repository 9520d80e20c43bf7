"""Factories' names and arguments, checked from source text: nothing is imported. Free of torch.

What cannot be read so (code that is made at run time, packages that are not installed) is left to
`build.check_factories`, which imports.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from accel.errors import ConfigError, Problem
from runner import build, factory, signatures, trust
from runner.registry import Registry
from runner.schema import Recipe
from runner.signatures import Signature

TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict)},
    **{"None": None, "Sequence": Sequence, "Mapping": Mapping, "Callable": Callable, "Any": Any},
    **{"Optional": typing.Optional, "Union": typing.Union, "Literal": typing.Literal},
}
Function = ast.FunctionDef | ast.ClassDef


def problems(recipe: Recipe) -> list[Problem]:
    """Return what is wrong with the names and arguments of a recipe's factories."""
    found: list[Problem] = []
    for key, node, registry in factory.nodes_of(recipe, found):
        try:
            found += _problems(recipe, key, node, registry)
        except ConfigError as error:
            found += factory.under(error, registry.kind, key).problems
    return found


def unknown(recipe: Recipe) -> bool:
    """Return whether a recipe names factories that are not registered so far."""
    return any(
        isinstance(node, Mapping) and node.get("name") not in (None, *registry.names())
        for _, node, registry in factory.nodes_of(recipe, [])
    )


def _problems(recipe: Recipe, key: str, node: Any, registry: Registry) -> list[Problem]:
    name, target, arguments = factory.named(key, node, registry)
    if target is not None:
        distrusted = trust.distrust(target, f"{key}._target_")
        if distrusted is not None:
            return [distrusted]
        label, place = target.rpartition(".")[2], target
    else:
        registry.require(str(name))
        label, place = str(name), registry.built_in(str(name)) or ""
    signature = signature_of(place.replace(":", "."), factory.num_given(key, target is None))
    if signature is None:
        return []
    if key != "step":
        return signatures.check(signature, arguments, key, label)
    rest = {n: p for n, p in signature.parameters.items() if n not in build.STEP_PARTS}
    own = Signature(rest, signature.open, signature.hints)
    wrong = signatures.check(own, arguments, key, label)
    return [*wrong, *build.step_problems(recipe, label, signature)]


def arguments_of(registry: Registry, name: str, key: str) -> list[str]:
    """Return the names of the arguments that a recipe may give to a factory, as far as known."""
    place = registry.built_in(name)
    if place is None and name in registry.names():
        return list(signatures.read(registry.get(name), factory.num_given(key, True)).parameters)
    found = signature_of((place or "").replace(":", "."), factory.num_given(key, True))
    return [] if found is None else list(found.parameters)


@cache
def signature_of(dotted: str, num_given: int = 0) -> Signature | None:
    """Return what a function or class of a dotted name takes, or None where text does not tell.

    Args:
        dotted: ``package.module.attribute``.
        num_given: how many first parameters the runner gives.
    """
    found = _definition(dotted)
    if isinstance(found, ast.ClassDef):
        inits = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not inits:
            return None
        return _signature(inits[-1], num_given + 1)
    return None if found is None else _signature(found, num_given)


def _definition(dotted: str, depth: int = 0) -> Function | None:
    """Return the definition that a dotted name leads to, through imports of modules."""
    module, _, name = dotted.rpartition(".")
    path = _source(module)
    if path is None or depth > 5:
        return None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    origin = _origin(node, package)
                    return _definition(f"{origin}.{alias.name}", depth + 1)
    return None


def _origin(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _source(module: str) -> Path | None:
    """Return the file of a module; only the place of its top-level package is looked up."""
    top, *rest = module.split(".")
    if not top or top == "__main__":
        return None
    loaded = sys.modules.get(top)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(top)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder, *rest)
        for candidate in (path / "__init__.py", path.with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None


def _signature(function: ast.FunctionDef, num_given: int) -> Signature:
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
            default=inspect.Parameter.empty if default is None else ast.unparse(default),
        )
        for argument, default in pairs
        if argument.arg not in positional
    }
    hints = {
        argument.arg: hint
        for argument, _ in pairs
        if argument.annotation is not None
        for hint in _hint(argument.annotation)
    }
    return Signature(parameters, arguments.kwarg is not None, hints)


def _hint(annotation: ast.expr) -> Iterator[Any]:
    """Yield the type that an annotation of plain names stands for; nothing for any other."""
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    plain = (ast.Name, ast.Constant, ast.BinOp, ast.BitOr, ast.Subscript, ast.Tuple, ast.Load)
    if names <= TYPES.keys() and all(isinstance(node, plain) for node in ast.walk(annotation)):
        yield eval(compile(ast.Expression(annotation), "<annotation>", "eval"), dict(TYPES))
