"""A sign of life while PyTorch is loaded, which takes seconds. Free of torch."""

from __future__ import annotations

import sys

_unfinished = False  # whether the last line on the terminal is that of `announce`


def announce(name: str) -> None:
    """Print the name of a run on standard error, if torch is still to be loaded.

    On a terminal the next line replaces it.
    """
    if "torch" in sys.modules:
        return
    global _unfinished
    _unfinished = sys.stderr.isatty()
    end = "\r" if _unfinished else "\n"
    print(f"{name}: loading PyTorch …", end=end, file=sys.stderr, flush=True)


def interrupted() -> None:
    """Finish the line of `announce` after a Ctrl-C that nothing else has told of."""
    global _unfinished
    if _unfinished:
        _unfinished = False
        print("\nInterrupted.", file=sys.stderr, flush=True)
