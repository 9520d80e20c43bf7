"""A progress bar that one process shows."""

from __future__ import annotations

from typing import Any

from accel.machine.errors import ConfigError
from accel.machine.imports import require
from accel.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of tqdm, which only the main process shows.

    Args:
        args: of `tqdm.auto.tqdm`: the iterable first.
        main_process_only: whether other processes show none.
        kwargs: of `tqdm.auto.tqdm`; with `disable`, no process shows it.

    Raises:
        ConfigError: if true or false stands in the iterable's place, as in an older release.
        MissingPackageError: if tqdm is not installed.

    Source: https://tqdm.github.io/docs/tqdm/
    """
    bar = require("tqdm.auto", "accel.utils.tqdm", package="tqdm").tqdm
    if args and isinstance(args[0], bool):
        raise ConfigError.of(
            f"tqdm({args[0]}, …)",
            "its first argument is the iterable",
            f"Give main_process_only={args[0]} by name.",
        )
    hidden = main_process_only and not PartialState().is_main_process
    return bar(*args, **{**kwargs, "disable": hidden or kwargs.get("disable", False)})
