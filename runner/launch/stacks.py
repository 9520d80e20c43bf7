"""The Python stack of a thread, and its activity. Free of torch."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.strategies.table import specs

_ROOT = Path(__file__).absolute().parents[2]
_PACKAGES = (
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    str(_ROOT / "runner") + "/",
    str(_ROOT / "accel") + "/",
    "/site-packages/",
    "<",
)
# Innermost files of a thread that waits for other ranks.
_COLLECTIVES = (
    *("/torch/distributed/", "/accel/comm/"),
    *(f"/{name}/" for spec in specs() for name in spec.packages),
)
_THROUGH = ("/torch/_ops.py", "/torch/utils/_contextlib.py")  # calls of others pass through here
_BACKWARD = "_engine_run_backward"  # waits in native code for the gradients of other ranks
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/")
# Functions that wait for a person: the prompt of pdb, and the one of debugpy for its editor.
_DEBUGGERS = {"cmdloop", "do_wait_suspend"}

BUSY, IN_TORCH, WAITING = "busy", "in torch", "waiting"


@dataclass(frozen=True)
class Place:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """The Python stack of a thread, outermost call first.

    `text` is as a traceback shows it: the user's own lines, where there are any.
    """

    places: tuple[Place, ...]
    text: str

    @classmethod
    def of_main_thread(cls) -> Stack:
        """Return the stack of this process's main thread, as it is now."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        summary = traceback.extract_stack(frame)
        places = tuple(Place(line.filename, line.lineno or 0, line.name) for line in summary)
        own = [line for line in summary if _is_own(line.filename)]
        return cls(places, "".join(traceback.format_list(own or list(summary))))

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Stack:
        """Return the stack that `plain` describes."""
        return cls(tuple(Place(**place) for place in plain["places"]), plain["text"])

    @property
    def own(self) -> Place:
        """The innermost line of the user's code; where there is none, the innermost of all."""
        found = (place for place in reversed(self.places) if _is_own(place.file))
        return next(found, self.places[-1])

    @property
    def kind(self) -> str:
        """Activity of the thread: "waiting" for other ranks, "in torch", or else "busy"."""
        if any(place.file.startswith("<frozen importlib") for place in self.places):
            return BUSY  # it imports, perhaps a module of torch's
        inner = next(p for p in reversed(self.places) if not p.file.endswith(_THROUGH))
        if inner.function == _BACKWARD or any(part in inner.file for part in _COLLECTIVES):
            return WAITING
        in_torch = "/torch/" in inner.file and "/torch/utils/data/" not in inner.file
        return IN_TORCH if in_torch else BUSY

    @property
    def compiles(self) -> bool:
        """Whether a model is being compiled."""
        return any(part in place.file for place in self.places for part in _COMPILERS)

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger waits for a person."""
        return any(place.function in _DEBUGGERS for place in self.places)


def _is_own(file: str) -> bool:
    return not any(part in file for part in _PACKAGES)
