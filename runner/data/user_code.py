"""Errors of the user's data that torch's loaders would take for something else.

StopIteration ends an epoch early, in silence. From a loader worker, SystemExit and
KeyboardInterrupt reach nobody, and an exception that cannot be pickled leaves the training process
waiting for ever.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.utils.data import default_collate, get_worker_info

from accel.machine.errors import AccelError
from runner.recipe.user_frames import one_line


class DataError(AccelError, RuntimeError):
    """The user's data raised an error that a loader loses, or cannot be collated."""


class UserCode:
    """Context in which the user's code `source` reads data: its errors reach the training loop."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        in_worker = get_worker_info() is not None
        if isinstance(error, StopIteration) or (in_worker and not _is_picklable(error)):
            raise DataError(f"{self._source} raised {one_line(error)}") from error


def _is_picklable(error: BaseException) -> bool:
    try:
        pickle.dumps(type(error))
        str(error)
    except Exception:
        return False
    return isinstance(error, Exception)


class Collate:
    """The user's `collate_fn`, whose errors reach the training loop."""

    def __init__(self, function: Callable[[list[Any]], object]) -> None:
        self.function = function

    def __call__(self, samples: list[object]) -> object:
        """Return the batch of `samples`."""
        with UserCode("collate_fn"):
            return self.function(samples)


def collate(samples: list[object]) -> object:
    """Return the batch of `samples`, as torch joins them by default.

    Raises:
        DataError: if they differ in shape, keys or length, or are no numbers.
    """
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise DataError(
            f"samples cannot be collated ({one_line(error)}): they must agree in type, "
            "shape and keys. Pad them in the data set, or give Data(collate_fn=…)."
        ) from error
