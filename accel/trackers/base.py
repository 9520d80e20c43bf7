"""The interface of an experiment tracker, for ours and for a user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch

from accel.logging import get_logger
from accel.machine.errors import StateError
from accel.state import PartialState

logger = get_logger(__name__)
Method = TypeVar("Method", bound=Callable[..., Any])
V = TypeVar("V")
CHANNELS = (1, 3, 4)
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
    `store_init_configuration` and `log`. It may give an attribute `run_id`, which
    `resume_arguments` then takes.

    Args:
        _blank: whether the attributes of the subclass are not checked.

    Attributes:
        name: the name by which the tracker is chosen.
        requires_logging_directory: whether it writes into a folder that must be given.
        main_process_only: whether only the main process logs.
        run_id: the library's id of the open run, which checkpoints keep as text; None: it has none.
        failed: whether the run ends with an exception; set before `finish`, where it is a boolean.

    Raises:
        NotImplementedError: naming the attributes that a subclass lacks.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: ClassVar[bool] = True
    failed: bool = False
    if TYPE_CHECKING:

        @property
        def run_id(self) -> object:
            """The library's id of the open run."""

    else:
        run_id = None  # no property: subclasses may assign it

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            require_attributes(type(self))

    @property
    def tracker(self) -> Any:
        """The object of the tracking library, for what this interface does not cover."""
        raise NotImplementedError(f"{type(self).__name__} defines no property `tracker`.")

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        """Return the arguments with which the constructor opens an earlier run.

        Args:
            run_id: `run_id` of that run.
        """
        return {}

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
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for the library's own call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not log images.")

    def flush(self) -> None:
        """Write what is buffered; called by `Accelerator.save_state`, before it keeps `run_id`."""

    def finish(self) -> None:
        """Flush and close the run."""

    def discard(self) -> None:
        """Close a run in which nothing is logged but the configuration; remove it where possible.

        Called by `Accelerator.load_state`, which opens the checkpoint's run in its place.
        """
        self.finish()


class Values(NamedTuple):
    """Values of one step by name: numbers and texts, or images as `images_of` returns them."""

    numbers: Mapping[str, float]
    texts: Mapping[str, str]
    images: Mapping[str, list[Any]]


class LibraryTracker(GeneralTracker):
    """Base of trackers that are one run object of a library: opened once, closed once.

    A subclass opens it in `_open`, closes it in `_close`, and gives it values in `_configure` and
    `_write`. Attributes that the tracker lacks are those of the run object:
    ``get_tracker("wandb").log_artifact(…)``.

    Args:
        run_name: name of the run or the project, as the library takes it.
        kwargs: arguments of the library's own call that opens a run.
    """

    requires_logging_directory = False
    id_path: ClassVar[str] = "id"  # of the run object's attribute that is its id; empty: none is
    flushes: ClassVar[bool] = False  # whether the run object buffers, and has a `flush`
    alias: ClassVar[str] = ""  # the run object, as an attribute that the documentation names

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._run: Any = None
        self._finished = False

    def _open(self) -> object:
        raise NotImplementedError(f"{type(self).__name__} opens no run.")

    def _close(self, run: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} closes no run.")

    def _configure(self, values: dict[str, Any]) -> None:
        """Record hyper-parameters in the types that every library stores, nested as they are."""
        raise NotImplementedError(f"{type(self).__name__} does not store configurations.")

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        """Record values of one step."""
        raise NotImplementedError(f"{type(self).__name__} does not log values.")

    @property
    def run_id(self) -> str | None:
        """The library's id of the open run."""
        run = self._run if self.id_path else None
        return None if run is None else str(attrgetter(self.id_path)(run))

    def flush(self) -> None:
        """Write what the library buffers."""
        if self.flushes and self._run is not None:
            self._run.flush()

    @property
    def tracker(self) -> Any:
        """The run object of the library; opened on first use.

        Raises:
            StateError: after `finish`.
        """
        if self._run is None:
            if self._finished:
                raise StateError(f"The tracker {self.name!r} is finished: call init_trackers(…).")
            self._run = self._open()
        return self._run

    def __getattr__(self, name: str) -> Any:
        run = None if name.startswith("_") else self.__dict__.get("_run")
        if run is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return run if name == self.alias else getattr(run, name)

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        assert self.tracker is not None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record hyper-parameters.

        Args:
            values: by name; may be nested.
        """
        self._configure(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and text; nested values are named ``outer/inner``.

        Args:
            values: by name: numbers, 0-d tensors, text or dicts of these.
            step: optimizer step; None leaves the axis to the library.
            kwargs: for the library's own call.
        """
        numbers, texts = scalars_and_texts(values)
        self._write(Values(numbers, texts, {}), step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for the library's own image or call.
        """
        images = {name: images_of(found) for name, found in values.items()}
        self._write(Values({}, {}, images), step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Flush and close the run, once."""
        run, self._run, self._finished = self._run, None, True
        if run is not None:
            self._close(run)


def numbered(name: str, items: Sequence[V], separator: str = "_") -> Iterator[tuple[str, V]]:
    """Yield each item with a name of its own: ``name`` for one, else ``name_<index>``."""
    for index, item in enumerate(items):
        yield (name if len(items) == 1 else f"{name}{separator}{index}"), item


class IncompleteTrackerError(NotImplementedError, ValueError):
    """A tracker class lacks attributes."""


def require_attributes(kind: type) -> None:
    """Raise `IncompleteTrackerError` unless a tracker class gives all it must."""
    base = GeneralTracker
    missing = [n for n in REQUIRED if getattr(kind, n, None) is getattr(base, n, None)]
    if missing:
        raise IncompleteTrackerError(
            f"The tracker {kind.__name__} lacks {', '.join(missing)}. "
            f"Define {'them' if len(missing) > 1 else 'it'} in the class."
        )


def plain(value: Any) -> Any:
    """Return a nested configuration in the types that every library stores.

    Args:
        value: mappings and sequences of anything.

    Returns:
        The same in dicts with text for keys, lists, text, numbers, booleans and None: enumerations
        by value, paths and anything else as text.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, PathLike):
        return str(fspath(value))
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else str(value)


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one, its keys joined by slashes."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(name: str, value: Any) -> float | None:
    """Return a number or a tensor of one element as a float; anything else as None, with a warning.

    A value that cannot be recorded is no reason to end a training.

    Args:
        name: of the value, for the warning.
        value: the number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        logger.warning_once(
            "log: %s of type %s is skipped: a value is a number, a tensor of one element, text or "
            "a dict of numbers. Reduce it first, or use log_images.",
            name,
            type(value).__name__,
        )
        return None


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers as floats, without the others."""
    found = {name: number(name, value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def scalars_and_texts(values: Mapping[str, object]) -> tuple[dict[str, float], dict[str, str]]:
    """Divide values into numbers and texts; keys of nested mappings are joined by slashes.

    Args:
        values: by name: numbers, tensors of one element, text or mappings of these.

    Returns:
        (numbers by name, texts by name), without any other value.
    """
    flat = flatten(values)
    texts = {name: value for name, value in flat.items() if isinstance(value, str)}
    return numbers({name: v for name, v in flat.items() if name not in texts}), texts


def detached(values: Mapping[str, object]) -> dict[str, object]:
    """Return values with tensors of one element as Python numbers; others as they are."""
    return {name: _detached(value) for name, value in values.items()}


def _detached(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return detached(value) if isinstance(value, Mapping) else value


def images_of(images: Any) -> list[Any]:
    """Return the images of one name as a list, arrays with channels last.

    Args:
        images: one image or a sequence of them: PIL's, a path, or an array or tensor [H, W],
            [H, W, C] or [C, H, W] (C = 1, 3 or 4); or a batch of these with N as first dim.

    Returns:
        Of floats in [0, 1] and of booleans, bytes in [0, 255]: not every library scales them.
    """
    if not isinstance(images, (list, tuple)):
        return _as_bytes(_images_of(images))
    return _as_bytes([one for image in images for one in _images_of(image)])


def _images_of(images: Any) -> list[Any]:
    if isinstance(images, (list, tuple)):
        return [one for image in images for one in _images_of(image)]
    if isinstance(images, torch.Tensor):
        images = images.detach().cpu()
        images = (images.float() if images.is_floating_point() else images).numpy()
        is_channels_first = images.ndim > 2 and images.shape[-3] in CHANNELS
    elif isinstance(images, np.ndarray) and images.ndim > 2:
        is_channels_first = images.shape[-3] in CHANNELS and images.shape[-1] not in CHANNELS
    else:
        is_channels_first = False
    if is_channels_first:
        images = np.moveaxis(images, -3, -1)
    if getattr(images, "ndim", 0) == 3 and images.shape[-1] not in CHANNELS:
        return list(images)
    if getattr(images, "ndim", 0) > 2 and images.shape[-1] == 1:
        images = images[..., 0]
        return list(images) if images.ndim > 2 else [images]
    return list(images) if getattr(images, "ndim", 0) > 3 else [images]


def _as_bytes(images: list[Any]) -> list[Any]:
    """Return images whose pixels are shares, in all arrays, as bytes."""
    arrays = [image for image in images if isinstance(image, np.ndarray) and image.size]
    shares = [
        one for one in arrays if one.dtype == np.bool_ or np.issubdtype(one.dtype, np.floating)
    ]
    if not shares or any(one.min() < 0 or one.max() > 1 for one in shares):
        return images
    known = {id(one) for one in shares}
    return [(i.astype(np.float32) * 255).astype(np.uint8) if id(i) in known else i for i in images]
