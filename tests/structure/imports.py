"""Cycles among modules that import each other in any way: at the top, lazily, for types only."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.structure.source import Source

Graph = dict[str, set[str]]


def imported(source: Source, known: set[str]) -> Iterator[str]:
    """Yield the modules of `known` that a file imports, wherever the import stands.

    ``from a import b`` imports ``a.b`` where that is a module, else ``a``. That importing ``a.b``
    runs ``a/__init__`` first counts for nothing.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = _absolute(source, node)
            for alias in node.names:
                inner = f"{above}.{alias.name}"
                yield from (one for one in (inner if inner in known else above,) if one in known)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.place.removesuffix(".py").split("/")[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def graph(sources: Iterable[Source]) -> Graph:
    """Return the modules that each module imports."""
    sources = list(sources)
    known = {source.module for source in sources}
    return {source.module: set(imported(source, known)) - {source.module} for source in sources}


def cycles(edges: Graph) -> list[list[str]]:
    """Return the groups of modules that reach each other (strongly connected components)."""
    reached = {name: _reached(edges, name) for name in edges}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in edges
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reached(edges: Graph, start: str) -> set[str]:
    """Return the modules to which imports lead from `start`; itself only around a cycle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = edges.get(waiting.pop(), set()) - found
        found |= fresh
        waiting += fresh
    return found
