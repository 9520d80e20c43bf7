"""How long tests take decides where they run.

Without a mark: in `make test`. `slow`: in continuous integration for some minutes (SLOW_MINUTES),
in an order that SLOW_ORDER, its commit, shuffles: machines differ by a factor of three, and what
one commit does not reach another does. `long`: only where someone asks for all slow tests,
``make test ARGS="-m slow"``; a shorter form of each is among the others.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

MINUTES, ORDER, DEADLINE = "SLOW_MINUTES", "SLOW_ORDER", "SLOW_DEADLINE"


def one_in(
    count: int, values: Iterable[Any], name: Callable[[Any], str], *, first: int = 0
) -> list[Any]:
    """Return parameters of a slow test: of each `count` of them all but one are `long`."""
    return [
        pytest.param(one, id=name(one), marks=() if index % count == first else pytest.mark.long)
        for index, one in enumerate(values)
    ]


def begin() -> None:
    """Set the time at which slow tests are no longer begun, for workers that pytest starts, too."""
    if MINUTES in os.environ:
        os.environ.setdefault(DEADLINE, str(time.time() + 60 * float(os.environ[MINUTES])))


def require_time(item: pytest.Item) -> None:
    """Skip a slow test that is to begin after the deadline, if there is one."""
    deadline = os.environ.get(DEADLINE)
    if deadline is None or item.get_closest_marker("slow") is None:
        return
    if time.time() > float(deadline):
        pytest.skip(f"{MINUTES}={os.environ[MINUTES]} have passed: another order reaches it")


def shuffled(path: Path) -> str:
    """Return what sorts a file of tests, if they have only some minutes; empty: they have not."""
    if MINUTES not in os.environ:
        return ""
    seed = os.environ.get(ORDER, "")
    return hashlib.sha256(f"{seed} {path.name} {path.parent.name}".encode()).hexdigest()
