"""Errors of the engine in the words of a recipe: keys for constructors. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from accel.machine.errors import CheckpointError, ConfigError, Problem
from runner.recipe import keys
from runner.recipe.schema import Recipe

# Remedies of the engine for scripts, and their equivalents for a recipe.
CALLS = (
    (
        "Build the model as it was when it was saved, or pass strict=False.",
        "Leave the overrides of the model out: resume with the recipe that it was trained with.",
    ),
    (
        "Build the model as it was when it was saved.",
        "Leave the overrides of the model out: resume with the recipe that it was trained with.",
    ),
    (
        "Build the optimizer as it was when it was saved, over the same models.",
        "Leave the overrides of the model and the optimizer out.",
    ),
    (
        "Prepare and register the same objects as when it was saved.",
        "Resume with the step and the scheduler of the recipe that it was trained with.",
    ),
    (
        "Prepare and register the same objects as when it was saved, or use another checkpoint.",
        "Resume with the recipe that it was trained with, or remove this checkpoint.",
    ),
    (
        "If you know that it is whole, pass load_state(…, trust_unverified=True): it is read "
        "without running code. The next save_state writes a directory that can be verified.",
        "Resume from a complete checkpoint, or start a new run.",
    ),
    ("Go on from it with load_state(), set", "Set"),
    (
        "Make it dense, or save with safe_serialization=False.",
        "Make it dense in the model.",
    ),
)
ELSEWHERE = re.compile(r", in a script \w+\([^()]*\)")  # what a recipe has no use for
# The same as patterns, the more specific first.
PATTERNS = (
    (r"Accelerator\(mixed_precision='(\w+)'\)", r"precision=\1"),
    (r"\bmixed_precision='(\w+)'", r"precision=\1"),
    (
        r"\bStart a multiple of (\d+) processes",
        r"Set distributed=multi_gpu or multi_cpu, and distributed.num_processes to a "
        r"multiple of \1",
    ),
)


@contextmanager
def of_the_recipe() -> Iterator[None]:
    """Raise errors from inside the context as ones that name keys of the recipe."""
    try:
        yield
    except CheckpointError as error:
        message = translated(str(error))
        if message == str(error):
            raise
        raise type(error)(message) from error
    except ConfigError as error:
        problems = [
            Problem(*map(translated, (problem.value, problem.rule, problem.remedy)))
            for problem in error.problems
        ]
        if problems == list(error.problems):
            raise
        raise type(error)(*problems) from error


def translated(text: str) -> str:
    """Return an engine's sentence with ``fsdp.x=1`` for ``FullyShardedDataParallelPlugin(x=1)``."""
    text = ELSEWHERE.sub("", text)
    for words, instead in CALLS:
        text = text.replace(words, instead)
    for name, key in _owners():
        text = re.sub(rf"\b{name}\.(?=[a-z])", f"{key}.", text)
        for arguments in re.findall(rf"\b{name}\(([^()]+)\)", text):
            text = text.replace(f"{name}({arguments})", _keys(key, arguments))
    for pattern, instead in PATTERNS:
        text = re.sub(pattern, instead, text)
    return text


def _owners() -> list[tuple[str, str]]:
    """Return (class, dotted key) of each node of the schema that is built from a dataclass."""
    kinds = ((keys.node_of(key), key) for key in keys.typed_keys())
    return [(kind.__name__, key) for kind, key in kinds if kind not in (None, Recipe)]


def _keys(node: str, arguments: str) -> str:
    return ", ".join(
        f"{node}.{argument.strip()}" for argument in re.split(r",\s*(?=\w+=)", arguments)
    )
