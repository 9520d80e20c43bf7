"""The exceptions that `accel` raises on purpose.

    AccelError
    ├── ConfigError              (ValueError)    the request contradicts itself or the machine
    ├── StateError               (RuntimeError)  a call at the wrong time: state reset, never built
    ├── MissingPackageError      (ImportError)   an optional package is not installed
    ├── CheckpointError          (RuntimeError)  a checkpoint is missing, incomplete or altered
    │   └── DiskFullError                        the disk has no room for a file
    └── DistributedOperationException (RuntimeError) ranks disagree on what they exchange

Each message gives the value, the rule that it breaks and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from accel.machine.passwords import without_passwords

T = TypeVar("T")
_MAX_NAMED = 20  # names listed in a message


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Args:
        value: what was given and where, e.g. ``"mixed_precision='bf61'"``.
        rule: what holds instead, e.g. ``"it is one of no, fp16, bf16"``.
        remedy: what to do, e.g. ``"did you mean 'bf16'?"``.
    """

    value: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return without_passwords(f"{self.value}: {self.rule}. {self.remedy}")


_KNOWN = "Known names: "
# What people write elsewhere, where the name most like it in letters is another thing.
_ELSEWHERE = {
    **dict.fromkeys(("fp32", "float32", "32", "32-true", "full", "single", "none"), "no"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("float16", "half", "16", "16-mixed", "16-true", "amp"), "fp16"),
    **{"float8": "fp8"},
    **{"gpu": "cuda", "--use_cpu": "--cpu", "--use-cpu": "--cpu"},
}


def unknown_choice(where: str, value: object, known: Iterable[str]) -> Problem:
    """Return the problem that `value`, given in `where`, is none of the choices `known`."""
    names = [str(name) for name in known]
    rule = f"it is one of {', '.join(names)}"
    remedy = nearest(str(value), names)
    if remedy.startswith(_KNOWN) and names:  # the rule lists them
        remedy = "Choose one of them."
    return Problem(f"{where}={value!r}", rule, remedy)


class AccelError(Exception):
    """Base of every exception that `accel` raises on purpose."""


class ConfigError(AccelError, ValueError):
    """The request contradicts itself, the machine or the schema; it reports all `problems`."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    @classmethod
    def of(cls, value: str, rule: str, remedy: str) -> Self:
        """Return the error of one problem: what was given, what holds instead, what to do."""
        return cls(Problem(value, rule, remedy))

    @classmethod
    def raise_if(cls, problems: Sequence[Problem]) -> None:
        """Raise one error that names all `problems`, or return if there are none."""
        if problems:
            raise cls(*problems)


class Problems(list[Problem]):
    """Problems of a configuration, to be reported at once."""

    def add(self, value: str, rule: str, remedy: str) -> None:
        """Add a problem: what was given and where, what holds instead, what to do."""
        self.append(Problem(value, rule, remedy))

    def add_not_built(self, value: str, remedy: str) -> None:
        """Add an option that this version does not offer yet: what was given, what to do."""
        self.add(value, "this version does not offer it yet", remedy)

    def take(self, error: ConfigError) -> None:
        """Add the problems of `error`."""
        self.extend(error.problems)

    def collect(self, check: Callable[..., T], *args: object) -> T | None:
        """Return what `check` returns; on a `ConfigError` add its problems and return None."""
        try:
            return check(*args)
        except ConfigError as error:
            self.take(error)
            return None

    def raise_if(self) -> None:
        """Raise a `ConfigError` of all, if any."""
        ConfigError.raise_if(self)


class ArgumentTypeError(ConfigError, TypeError):
    """An argument whose documented error is a TypeError."""


class StateError(AccelError, RuntimeError):
    """A call at the wrong time, such as the use of a state that was reset."""

    @classmethod
    def of(cls, value: str, rule: str, remedy: str) -> Self:
        """Return the error of one problem: what was called, what holds instead, what to do."""
        return cls(str(Problem(value, rule, remedy)))


class ResetError(StateError, AttributeError):
    """The use of a state that was reset; what asks for an attribute that may lack finds none."""


class MissingPackageError(AccelError, ImportError):
    """An optional package is needed and not installed.

    Args:
        package: the name to install from the package index.
        needed_for: the request that needs it, e.g. ``"log_with='wandb'"``.
        extra: the extra of this distribution that brings it, if there is one.
    """

    def __init__(self, package: str, needed_for: str, extra: str | None = None) -> None:
        target = f"'accel-runner[{extra}]'" if extra else package
        super().__init__(
            f"{needed_for}: the package {package!r} is not installed. "
            f"Install it with `pip install {target}`."
        )
        self.package = package


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint is missing, incomplete, altered or does not fit the run."""

    def __init__(self, reason: Problem | str = "") -> None:
        super().__init__(str(reason))


class DiskFullError(CheckpointError):
    """The disk, or the quota, has no room for a file."""


class DistributedOperationException(AccelError, RuntimeError):
    """Ranks disagree on the shapes or types that they exchange (debug mode)."""


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the one of `known` most similar to `name`, by `cutoff` (0 to 1) at least, or None.

    One that differs in upper and lower case alone is the most similar.
    """
    names = list(known)
    same = [one for one in names if one.casefold() == name.casefold()]
    return next(iter(same or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def did_you_mean(*candidates: str) -> str:
    """Return the question that names the likeliest valid names."""
    return f"Did you mean {' or '.join(map(repr, candidates))}?"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the sentence that helps a person who mistyped `name`.

    That is ``"Did you mean 'x'?"`` where one of `known` is close, else the list of them.
    """
    names = [str(candidate) for candidate in known]
    elsewhere = _ELSEWHERE.get(name.lower())
    if elsewhere in names:
        return did_you_mean(elsewhere)
    # A transposition in a short name ("cnm" for "cnn") falls below the usual ratio.
    close = closest(name, names, cutoff=0.5 if len(name) <= 4 else 0.6)
    if close is not None:
        return did_you_mean(close)
    return _KNOWN + (", ".join(sorted(set(names))) or "none") + "."


def listed(names: Sequence[str]) -> str:
    """Return names as a message lists them, the first twenty.

    Args:
        names: any number of them.
    """
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def text_of(error: BaseException) -> str:
    """Return the message of an exception, also of one whose `__str__` raises."""
    try:
        return str(error).strip()
    except Exception as failure:
        return f"(its message cannot be read: __str__ raised {type(failure).__name__})"
