"""Late values: ``${facts:num_classes}`` in a recipe stands for what the data tells of itself.

Composing keeps the words; the processes of a run fill them in once they have built their data, and
the recorded recipe has the values. Free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from accel.machine.errors import Problem, nearest

RESOLVER = "facts"
_WORD = re.compile(r"\$\{facts:([^${}]*)\}")


def word(name: str) -> str:
    """Return what stands for a fact, as OmegaConf resolves it: itself."""
    return f"${{{RESOLVER}:{name}}}"


def is_late(value: object) -> bool:
    """Return whether a value is a text that waits for a fact."""
    return isinstance(value, str) and _WORD.search(value) is not None


def late(node: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of each late value in nested containers."""
    if isinstance(node, str) and is_late(node):
        yield key, node
    elif isinstance(node, (Mapping, list)):
        items = node.items() if isinstance(node, Mapping) else enumerate(node)
        for name, value in items:
            yield from late(value, f"{key}.{name}" if key else str(name))


def missing(node: object, facts: Mapping[str, object]) -> list[Problem]:
    """Return the problems of late values whose facts are not among those given."""
    rule = "the data tells no fact of that name"
    return [
        Problem(f"{key}={text}", rule, nearest(name, facts))
        for key, text in late(node)
        for name in _WORD.findall(text)
        if name not in facts
    ]


def filled(node: Any, facts: Mapping[str, object]) -> Any:
    """Return nested containers with facts in place of their words; a lone word becomes the fact."""
    if isinstance(node, Mapping):
        return {name: filled(value, facts) for name, value in node.items()}
    if isinstance(node, list):
        return [filled(value, facts) for value in node]
    if not is_late(node):
        return node
    alone = _WORD.fullmatch(node)
    return facts[alone[1]] if alone else _WORD.sub(lambda found: str(facts[found[1]]), node)


def recorded(node: Any, there: Any) -> Any:
    """Return nested containers with the values that another recipe has in place of late ones."""
    if isinstance(node, Mapping) and isinstance(there, Mapping):
        return {name: recorded(value, there.get(name)) for name, value in node.items()}
    if isinstance(node, list) and isinstance(there, list) and len(node) == len(there):
        return list(map(recorded, node, there))
    return there if is_late(node) and there is not None else node
