"""Errors of the engine in the words of a recipe: keys for constructors. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from accel.errors import ConfigError, Problem
from runner import keys
from runner.schema import Recipe


@contextmanager
def of_the_recipe() -> Iterator[None]:
    """Raise a `ConfigError` from inside the context as one that names keys of the recipe."""
    try:
        yield
    except ConfigError as error:
        problems = [
            Problem(*map(translated, (problem.value, problem.rule, problem.remedy)))
            for problem in error.problems
        ]
        if problems == list(error.problems):
            raise
        raise type(error)(*problems) from error


def translated(text: str) -> str:
    """Return a sentence with ``fsdp.x=1`` in the place of ``FullyShardedDataParallelPlugin(x=1)``.

    Args:
        text: a part of an error of the engine.
    """
    for name, key in _owners():
        text = re.sub(rf"\b{name}\.(?=[a-z])", f"{key}.", text)
        for arguments in re.findall(rf"\b{name}\(([^()]+)\)", text):
            text = text.replace(f"{name}({arguments})", _keys(key, arguments))
    return re.sub(r"Accelerator\(mixed_precision='(\w+)'\)", r"precision=\1", text)


def _owners() -> list[tuple[str, str]]:
    """Return (class, dotted key) of each node of the schema that is built from a dataclass."""
    kinds = ((keys.node_of(key), key) for key in keys.typed_keys())
    return [(kind.__name__, key) for kind, key in kinds if kind not in (None, Recipe)]


def _keys(node: str, arguments: str) -> str:
    return ", ".join(
        f"{node}.{argument.strip()}" for argument in re.split(r",\s*(?=\w+=)", arguments)
    )
