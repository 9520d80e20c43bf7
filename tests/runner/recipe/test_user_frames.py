"""Tracebacks cut down to the frames of the user's code (R9)."""

from __future__ import annotations

import torch

from runner.recipe import user_frames


def test_a_quoted_traceback_keeps_the_users_frames() -> None:
    lines = [
        "Caught KeyError in DataLoader worker process 0.",
        "Original Traceback (most recent call last):",
        f'  File "{torch.__file__}", line 1, in fetch',
        "    data = fetcher.fetch(index)",
        "           ^^^^^^^^^^^^^^^^^^^^",
        f'  File "{__file__}", line 2, in __getitem__',
        "    raise KeyError(index)",
        "KeyError: 3",
    ]
    assert user_frames.without_inner(lines) == [*lines[:2], *lines[5:]]
