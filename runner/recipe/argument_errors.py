"""Which argument of a recipe a factory's error is about. Free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accel.machine.errors import AccelError, ConfigError, Problem, text_of
from runner.recipe import user_frames

# Errors that no argument causes: the machine, or missing code.
OF_THE_MACHINE = (ImportError, MemoryError, OSError)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?![\w.]*\w)", re.IGNORECASE)


@contextmanager
def factory_errors(key: str, place: str, arguments: Mapping[str, object]) -> Iterator[None]:
    """Raise an error of torch's or of a shipped factory as one that names the recipe's keys.

    An error that passed through the user's own code is unchanged, with a note on the node.

    Raises:
        ConfigError: naming the keys and their problem.
    """
    try:
        yield
    except AccelError:
        raise
    except Exception as error:
        if user_frames.has_own(error) or isinstance(error, OF_THE_MACHINE):
            error.add_note(f"It was raised while {place} was built.")
            raise
        raise ConfigError(problem(key, place, arguments, error)) from error


def problem(key: str, place: str, arguments: Mapping[str, object], error: Exception) -> Problem:
    """Return the problem with the arguments that an error is about."""
    text = text_of(error)
    names = about(arguments, text)
    rule = (text or type(error).__name__).splitlines()[0].rstrip(".")
    if not isinstance(error, ValueError):
        rule = f"{type(error).__name__}: {rule}"
    if not arguments:
        return Problem(place, rule, f"Choose another {key}, or correct it.")
    values = ", ".join(f"{key}.{name}={arguments[name]}" for name in names or arguments)
    return Problem(values, rule, "Correct the value.")


def about(arguments: Mapping[str, object], text: str) -> list[str]:
    """Return the arguments whose name, else whose value, is in an error's message."""
    words = {word.lower() for word in re.findall(r"\w+", text)}
    named = [name for name in arguments if name.lower() in words]
    if named:
        return named
    numbers = {float(number) for number in _NUMBER.findall(text)}
    return [name for name, value in arguments.items() if _values(value) & (numbers | words)]


def _values(value: object) -> set[float | str]:
    """Return the numbers, or the text, that a value consists of."""
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, (int, float)):
        return {float(value)}
    if isinstance(value, (list, tuple)):
        return set().union(*map(_values, value)) if value else set()
    return {str(value).lower()}


def not_finite(key: str, arguments: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each number that is infinite or not a number."""
    return [
        Problem(f"{key}.{name}={value}", "a finite number is required", "Correct the value.")
        for name, value in arguments.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
