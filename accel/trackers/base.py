"""The interface of an experiment tracker, for ours and for a user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from accel.state import PartialState

Method = TypeVar("Method", bound=Callable[..., Any])
REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: Method) -> Method:
    """Decorate a method of a tracker so that it runs only on the main process.

    A tracker whose `main_process_only` is False runs it on every process.

    Args:
        function: the method.

    Returns:
        A method that does nothing, and returns None, on other processes.
    """

    @functools.wraps(function)
    def method(self: object, *args: object, **kwargs: object) -> object:
        if getattr(self, "main_process_only", True) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return cast(Method, method)


class GeneralTracker:
    """Base of experiment trackers.

    A subclass gives `name`, `requires_logging_directory` and `tracker`, and overrides
    `store_init_configuration` and `log`.

    Attributes:
        name: the name by which the tracker is chosen.
        requires_logging_directory: whether it writes into a folder that must be given.
        main_process_only: whether only the main process logs.

    Raises:
        NotImplementedError: naming the attributes that a subclass lacks.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: ClassVar[bool] = True

    def __init__(self) -> None:
        require_attributes(type(self))

    @property
    def tracker(self) -> Any:
        """The object of the tracking library, for what this interface does not cover."""
        raise NotImplementedError(f"{type(self).__name__} defines no property `tracker`.")

    def start(self) -> None:
        """Open the run; called once, by `Accelerator.init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyper-parameters of the run.

        Args:
            values: by name; may be nested.
        """
        raise NotImplementedError(f"{type(self).__name__} does not store configurations.")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step.

        Args:
            values: by name: numbers, 0-d tensors, text or dicts of numbers.
            step: optimizer step; None leaves the axis to the library.
            kwargs: for the library's own call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not log values.")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images of one step.

        Args:
            values: by name: images [N, H, W, C] or [N, C, H, W], as the library takes them.
            step: optimizer step.
            kwargs: for the library's own call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not log images.")

    def finish(self) -> None:
        """Flush and close the run."""


def require_attributes(kind: type) -> None:
    """Raise `NotImplementedError` unless a tracker class gives all it must."""
    base = GeneralTracker
    missing = [n for n in REQUIRED if getattr(kind, n, None) is getattr(base, n, None)]
    if missing:
        raise NotImplementedError(
            f"The tracker {kind.__name__} lacks {', '.join(missing)}. "
            f"Define {'them' if len(missing) > 1 else 'it'} in the class."
        )


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one, its keys joined by slashes."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
