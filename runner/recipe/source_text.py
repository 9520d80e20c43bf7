"""Definitions in the source text of a module, where they are unambiguous: nothing is imported.

A name that is bound twice, in a branch, by a star import or by code that makes names is ambiguous;
so is a function with a decorator, or a class with a base, that may change its signature.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef

# Decorators that keep the signature of the function or class.
KEEP_SIGNATURE = (
    *(
        "runner.register.",
        "runner.recipe.registry.register.",
        "functools.cache",
        "functools.lru_cache",
    ),
    *("torch.no_grad", "torch.enable_grad", "torch.inference_mode", "typing.final"),
)
# Bases without a metaclass or a `__new__` of their own that a call would go to first.
PLAIN_BASES = (
    *("builtins.object", "abc.ABC", "typing.Generic", "typing.Protocol", "runner."),
    *("torch.nn.", "torch.optim.", "torch.utils.data."),
)
_MAKE_NAMES = ("exec", "globals", "locals", "vars")
_MOST_IMPORTS, _MOST_BASES = 5, 10


@dataclass(frozen=True)
class Module:
    """The source text of a module.

    Relative imports start from `package`; `bound` has, by name, each way in which the module's own
    scope binds it.
    """

    name: str
    package: str
    body: tuple[ast.stmt, ...]
    bound: dict[str, set[str]]

    def top_level(self, name: str) -> Definition | str | None:
        """Return the definition of a name, or the dotted name it is imported from, if certain."""
        if len(self.bound.get(name, ())) != 1 or "*" in self.bound:
            return None
        for node in self.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{_origin(node, self.package)}.{alias.name}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name:
                        return alias.name if alias.asname else name
        return None

    def dotted(self, node: ast.expr) -> str | None:
        """Return the dotted name that an expression such as ``nn.Module`` stands for."""
        if isinstance(node, (ast.Call, ast.Subscript)):
            return self.dotted(node.func if isinstance(node, ast.Call) else node.value)
        if isinstance(node, ast.Attribute):
            head = self.dotted(node.value)
            return None if head is None else f"{head}.{node.attr}"
        if not isinstance(node, ast.Name) or "*" in self.bound:
            return None
        if node.id not in self.bound:
            return f"builtins.{node.id}" if hasattr(builtins, node.id) else None
        found = self.top_level(node.id)
        return f"{self.name}.{node.id}" if isinstance(found, Definition) else found


def definition(dotted: str, depth: int = 0) -> tuple[Definition, Module] | None:
    """Return the definition that a dotted name leads to, through imports, and its module."""
    place, _, name = dotted.rpartition(".")
    module = read(place)
    if module is None or depth > _MOST_IMPORTS:
        return None
    found = module.top_level(name)
    if isinstance(found, str):
        return definition(found, depth + 1)
    return None if found is None else (found, module)


def called(found: Definition, module: Module) -> ast.FunctionDef | None:
    """Return the function that gets the arguments of a call, where nothing may stand before it."""
    if not all(_is_one_of(module, node, KEEP_SIGNATURE) for node in found.decorator_list):
        return None
    if isinstance(found, ast.FunctionDef):
        return found
    bound = _bound(found.body)
    if not _is_plain(found, module) or len(bound.get("__init__", ())) != 1:
        return None
    inits = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return inits[0] if inits and not inits[0].decorator_list else None


def _is_plain(found: ast.ClassDef, module: Module, depth: int = 0) -> bool:
    """Return whether a call of a class goes straight to an `__init__`."""
    changing = {"__new__", "__init_subclass__", "__signature__", "*"}
    if found.keywords or depth > _MOST_BASES or changing & set(_bound(found.body)):
        return False
    for base in found.bases:
        if _is_one_of(module, base, PLAIN_BASES):
            continue
        dotted = module.dotted(base)
        inner = definition(dotted) if dotted is not None else None
        if inner is None or not isinstance(inner[0], ast.ClassDef):
            return False
        if inner[0].decorator_list or not _is_plain(inner[0], inner[1], depth + 1):
            return False
    return True


def _is_one_of(module: Module, node: ast.expr, names: tuple[str, ...]) -> bool:
    dotted = module.dotted(node)
    return dotted is not None and any(
        dotted.startswith(name) if name.endswith(".") else dotted == name for name in names
    )


@cache
def read(module: str) -> Module | None:
    """Return a module's text, if there is one and it makes no names while it runs."""
    path = _source(module)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # importing it reports the error
        return None
    if any(_makes_names(node) for node in ast.walk(tree)):
        return None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return Module(module, package, tuple(tree.body), _bound(tree.body))


def _makes_names(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return (
            node.attr == "modules" and isinstance(node.value, ast.Name) and node.value.id == "sys"
        )
    return isinstance(node, ast.Name) and node.id in _MAKE_NAMES


def _bound(body: list[ast.stmt]) -> dict[str, set[str]]:
    """Return each way in which statements bind names of their scope, by name."""
    found: dict[str, set[str]] = defaultdict(set)
    for statement in body:
        for name, way in _bindings(statement):
            found[name].add(way)
    return dict(found)


def _bindings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name, way) of each binding below a node, without the scopes of functions."""
    way = f"{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, way
        for inner in ast.walk(node):
            if isinstance(inner, ast.Global):
                yield from ((name, f"global {way}") for name in inner.names)
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            plain = isinstance(node, ast.Import) and alias.asname is None
            name = alias.name.partition(".")[0] if plain else alias.asname or alias.name
            yield name, f"import {name}" if plain else way
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id, way
    elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        if isinstance(node.value, ast.Name):  # such as `factory.__signature__ = …`
            yield node.value.id, way
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        given = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
        yield from ((name.id, way) for name in given if isinstance(name, ast.Name))  # changes it
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name, way
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest, way
    for child in ast.iter_child_nodes(node):
        yield from _bindings(child)


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
    try:
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is not None and not rest and spec.has_location and str(spec.origin).endswith(".py"):
        return Path(str(spec.origin))
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder, *rest)
        for candidate in (path / "__init__.py", path.with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None
