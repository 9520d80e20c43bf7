"""The table of trackers: a name, where its class is, and whether its library is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from accel.enums import LoggerType
from accel.errors import ConfigError, MissingPackageError, NotBuiltError, Problem, nearest
from accel.imports import is_tensorboard_available, load_attribute
from accel.trackers.base import GeneralTracker, require_attributes

# A name, a class of a user's own, or an object of one.
Wanted = str | LoggerType | GeneralTracker | type[GeneralTracker]
# A chosen tracker: a class that is yet to be built, or an object.
Choice = GeneralTracker | type[GeneralTracker]


@dataclass(frozen=True)
class Entry:
    """A tracker's place ("module:Class"), the package of its library, whether that is installed."""

    place: str
    package: str
    is_available: Callable[[], bool]

    def load(self) -> type[GeneralTracker]:
        """Return the class."""
        found: type[GeneralTracker] = load_attribute(self.place)
        return found


TRACKERS: dict[str, Entry] = {
    "tensorboard": Entry(
        "accel.trackers.tensorboard:TensorBoardTracker", "tensorboard", is_tensorboard_available
    ),
}


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers whose libraries are installed."""
    return [LoggerType(name) for name, entry in TRACKERS.items() if entry.is_available()]


def filter_trackers(
    log_with: Wanted | Iterable[Wanted] | None, logging_dir: str | None = None
) -> list[Choice]:
    """Return the requested trackers.

    Args:
        log_with: names ("all": every one that is installed), classes or objects; one or several.
        logging_dir: folder of the trackers.

    Returns:
        Classes and objects, each once, in the order of the request.

    Raises:
        ConfigError: for an unknown name, or where a folder is needed and not given.
        MissingPackageError: if the library of a named tracker is not installed.
    """
    if log_with is None:
        return []
    single = isinstance(log_with, (str, GeneralTracker, type))
    wanted: Iterable[Any] = [log_with] if single else log_with  # type: ignore[assignment]
    chosen: list[Choice] = []
    for item in wanted:
        for choice in _choices(item):
            if choice not in chosen:
                chosen.append(choice)
    # An object was given its folder when it was made.
    classes = [choice for choice in chosen if inspect.isclass(choice)]
    ConfigError.raise_if(
        [
            Problem(
                f"log_with={kind.name!r}",
                "it writes into a folder",
                "Give Accelerator(project_dir=…), or ProjectConfiguration(logging_dir=…).",
            )
            for kind in classes
            if kind.requires_logging_directory is True and logging_dir is None
        ]
    )
    return chosen


def _choices(item: Any) -> list[Choice]:
    kind = item if inspect.isclass(item) else type(item)
    if issubclass(kind, GeneralTracker):
        require_attributes(kind)
        return [item]
    name = str(item).lower()
    if name == LoggerType.ALL:
        return [TRACKERS[tracker].load() for tracker in get_available_trackers()]
    return [_named(name)]


def _named(name: str) -> type[GeneralTracker]:
    if name not in TRACKERS:
        known = [*TRACKERS, str(LoggerType.ALL)]
        if name in LoggerType.list():
            raise NotBuiltError.of(
                f"log_with={name!r}",
                "this version does not offer it yet",
                f"Use {', '.join(known)}, or a GeneralTracker of your own.",
            )
        raise ConfigError.of(
            f"log_with={name!r}",
            f"it is one of {', '.join(known)}, or a GeneralTracker",
            nearest(name, known),
        )
    entry = TRACKERS[name]
    if not entry.is_available():
        raise MissingPackageError(entry.package, f"log_with={name!r}")
    return entry.load()
