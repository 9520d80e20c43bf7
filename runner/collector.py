"""How often Python looks for garbage: rarely while a command imports, as usual once it computes.

Imports make a million objects that stay. Looking for garbage among them after every 700 objects, as
Python does, takes a quarter of their time.
"""

from __future__ import annotations

import gc

RARE = (50_000, 20, 100)
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Look for garbage rarely until `collect_usually`: this process imports, or builds a run."""
    gc.set_threshold(*RARE)


def collect_usually() -> None:
    """Look for garbage as often as before: what comes now may last for days.

    Thresholds that the user's code has set meanwhile stay.
    """
    if gc.get_threshold() == RARE:
        gc.set_threshold(*_usual)
