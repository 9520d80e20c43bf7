"""The table of trackers: a name, where its class is, and whether its library is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accel.machine import imports
from accel.machine.enums import LoggerType
from accel.machine.errors import ConfigError, MissingPackageError, Problem, nearest
from accel.trackers.base import GeneralTracker, require_attributes

EXTRA = "trackers"
# A name, a class of a user's own, or an object of one.
Wanted = str | LoggerType | GeneralTracker | type[GeneralTracker]
# A chosen tracker: a class that is yet to be built, or an object.
Choice = GeneralTracker | type[GeneralTracker]


@dataclass(frozen=True)
class Entry:
    """One tracker of the table.

    Args:
        place: "module:Class".
        package: name of its library in the package index.
        is_available: whether that is installed.
        extra: the extra of this distribution that brings it.
    """

    place: str
    package: str
    is_available: Callable[[], bool]
    extra: str | None = EXTRA

    def load(self) -> type[GeneralTracker]:
        """Return the class."""
        found: type[GeneralTracker] = imports.load_attribute(self.place)
        return found


def _entry(name: str, kind: str, package: str, is_available: Callable[[], bool]) -> Entry:
    # Aim compiles its user interface when it is installed, which takes minutes.
    extra = None if name == "aim" else EXTRA
    return Entry(f"accel.trackers.{name}:{kind}", package, is_available, extra)


TRACKERS: dict[str, Entry] = {
    "tensorboard": _entry(
        "tensorboard", "TensorBoardTracker", "tensorboard", imports.is_tensorboard_available
    ),
    "wandb": _entry("wandb", "WandBTracker", "wandb", imports.is_wandb_available),
    "comet_ml": _entry("comet_ml", "CometMLTracker", "comet-ml", imports.is_comet_ml_available),
    "aim": _entry("aim", "AimTracker", "aim", imports.is_aim_available),
    "clearml": _entry("clearml", "ClearMLTracker", "clearml", imports.is_clearml_available),
    "dvclive": _entry("dvclive", "DVCLiveTracker", "dvclive", imports.is_dvclive_available),
    "mlflow": _entry("mlflow", "MLflowTracker", "mlflow", imports.is_mlflow_available),
    "swanlab": _entry("swanlab", "SwanLabTracker", "swanlab", imports.is_swanlab_available),
    "trackio": _entry("trackio", "TrackioTracker", "trackio", imports.is_trackio_available),
}
# Needs no library, so "all" leaves it out.
OWN = {"csv": Entry("accel.trackers.csv:CSVTracker", "accel-runner", lambda: True)}


class _Classes(Mapping[str, type[GeneralTracker]]):
    """The class of each shipped tracker, by name; imported when it is asked for."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        return {**TRACKERS, **OWN}[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter({**TRACKERS, **OWN})

    def __len__(self) -> int:
        return len({**TRACKERS, **OWN})


LOGGER_TYPE_TO_CLASS = _Classes()
# Classes of the user's own that have a name here.
REGISTERED: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Make a tracker class available by its `name`: ``Accelerator(log_with="my_tracker")``.

    Args:
        tracker_class: a subclass of `GeneralTracker`. It replaces one of the same name, shipped
            ones included.

    Returns:
        The class, so that this is a decorator, too.

    Raises:
        NotImplementedError: naming the attributes that it lacks.
    """
    require_attributes(tracker_class)
    REGISTERED[tracker_class.name] = tracker_class
    return tracker_class


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers whose libraries are installed."""
    return [LoggerType(name) for name, entry in TRACKERS.items() if entry.is_available()]


def filter_trackers(
    log_with: Wanted | Iterable[Wanted] | None, logging_dir: str | None = None
) -> list[Choice]:
    """Return the requested trackers.

    Args:
        log_with: names ("all": those of installed libraries, and the registered ones), classes or
            objects; one or several.
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
        names = dict.fromkeys([*map(str, get_available_trackers()), *REGISTERED])
        return [_named(tracker) for tracker in names]
    return [_named(name)]


def _named(name: str) -> type[GeneralTracker]:
    if name in REGISTERED:
        return REGISTERED[name]
    table = {**TRACKERS, **OWN}
    if name not in table:
        known = [*table, *REGISTERED, str(LoggerType.ALL)]
        raise ConfigError.of(
            f"log_with={name!r}",
            f"it is one of {', '.join(known)}, or a GeneralTracker",
            nearest(name, known),
        )
    entry = table[name]
    if not entry.is_available():
        raise MissingPackageError(entry.package, f"log_with={name!r}", entry.extra)
    return entry.load()
