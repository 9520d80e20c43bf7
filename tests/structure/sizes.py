"""Sizes: lines, functions, files, `Any`, and the width of the interface of a strategy."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.structure.source import Source

FACTS = ("Traits", "StrategySpec")


@dataclass(frozen=True)
class Function:
    """A function or method, nested ones included.

    Attributes:
        name: the file, and the name of the function.
        num_lines: from ``def`` to the last line, docstring included.
    """

    name: str
    num_lines: int


def functions(sources: Iterable[Source]) -> list[Function]:
    """Return all functions of `sources`, the longest first."""
    found = [
        Function(f"{source.place}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sorted(found, key=lambda one: (-one.num_lines, one.name))


def median_and_p90(lengths: list[int]) -> tuple[float, int]:
    """Return the median of `lengths`, and the length that 90 % do not exceed."""
    ordered = sorted(lengths)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def longer(sources: Iterable[Source], limit: int) -> dict[str, int]:
    """Return the files of more than `limit` lines."""
    return {one.place: one.num_lines for one in sources if one.num_lines > limit}


def num_any(source: Source) -> int:
    """Return how often the name `Any` is used, imports apart."""
    return sum(
        getattr(node, "id", getattr(node, "attr", "")) == "Any" for node in ast.walk(source.tree)
    )


def any_per_thousand_lines(sources: Iterable[Source]) -> float:
    """Return uses of `Any` per 1,000 lines of `sources`."""
    sources = list(sources)
    return 1000 * sum(map(num_any, sources)) / sum(one.num_lines for one in sources)


def classes(sources: Iterable[Source]) -> dict[str, ast.ClassDef]:
    """Return the classes of `sources` by name."""
    return {
        node.name: node
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }


def declared(body: ast.ClassDef) -> list[str]:
    """Return the members of a class: methods, properties, attributes of it and of instances."""
    names = dict.fromkeys(_in_class(body))
    for method in body.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            names.update(dict.fromkeys(_set_on_self(method)))
    return list(names)


def _in_class(body: ast.ClassDef) -> Iterator[str]:
    for node in body.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _set_on_self(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield node.attr


def public_members(sources: Iterable[Source], name: str) -> list[str]:
    """Return the public members of the class `name`; none where there is no such class."""
    body = classes(sources).get(name)
    return [] if body is None else [one for one in declared(body) if not one.startswith("_")]


def subclasses(known: dict[str, ast.ClassDef], base: str) -> list[str]:
    """Return the classes that derive from `base`, also by way of others."""
    found = [base]
    for above in found:
        found += [
            name
            for name, body in known.items()
            if above in [ast.unparse(one).split(".")[-1] for one in body.bases]
            and name not in found
        ]
    return found[1:]


def overriders(sources: Iterable[Source], name: str) -> dict[str, list[str]]:
    """Return, for each public member of the class `name`, the subclasses that declare it too."""
    sources = list(sources)
    known = classes(sources)
    below = {one: set(_in_class(known[one])) for one in subclasses(known, name)}
    return {
        member: [one for one, members in below.items() if member in members]
        for member in public_members(sources, name)
    }
