"""A progress bar that one process shows."""

from __future__ import annotations

import warnings
from typing import Any

from accel.imports import require
from accel.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of tqdm, which only the main process shows.

    Args:
        args: of `tqdm.auto.tqdm`: the iterable first. (In an older spelling, `main_process_only`
            goes before it.)
        main_process_only: whether other processes show none.
        kwargs: of `tqdm.auto.tqdm`; with `disable`, no process shows it.

    Raises:
        MissingPackageError: if tqdm is not installed.

    Source: https://tqdm.github.io/docs/tqdm/
    """
    bar = require("tqdm.auto", "accel.utils.tqdm", package="tqdm").tqdm
    if args and isinstance(args[0], bool):
        main_process_only, *args = args  # type: ignore[assignment]
        warnings.warn(
            "tqdm(main_process_only, …): give it by name, main_process_only=….",
            FutureWarning,
            stacklevel=2,
        )
    hidden = main_process_only and not PartialState().is_main_process
    return bar(*args, **{**kwargs, "disable": hidden or kwargs.get("disable", False)})
