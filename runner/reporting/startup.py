"""A sign of life while PyTorch is loaded, which takes seconds. Free of torch."""

from __future__ import annotations

import sys


def announce(name: str) -> None:
    """Print the name of a run on standard error, if torch is still to be loaded.

    On a terminal the next line replaces it.
    """
    if "torch" in sys.modules:
        return
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{name}: loading PyTorch …", end=end, file=sys.stderr, flush=True)
