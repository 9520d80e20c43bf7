"""A user's package: a tiny run that waits in a chosen phase, or ends in a chosen way.

Registered: ``model=null``-free factories called "small" and the callback "waiting".
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from accel.machine.env import Environment
from runner import Callback, Data, Objective, register

LIMIT_SECONDS = 600.0
NUM_SAMPLES = 64


def rank() -> int:
    """Return this process's rank; 0 where it is alone."""
    return Environment.read().rank or 0


def tell(folder: str, name: str, line: str) -> None:
    """Append a line to a file that whoever watches the run reads; whole, or not at all."""
    target = os.open(Path(folder) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(target, f"{line}\n".encode())
    finally:
        os.close(target)


def wait_in(folder: str, phase: str) -> None:
    """Say that this rank has reached `phase`, and wait until the file `go` is there."""
    place = Path(folder)
    if (place / "go").exists():
        return
    partial = place / f".{phase}_{rank()}"
    partial.write_text(str(os.getpid()))
    partial.rename(place / f"{phase}_{rank()}")
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (place / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody said go in {phase}")
        time.sleep(0.01)


# -- endings ---------------------------------------------------------------------------------------


class Wordless(Exception):
    """An error that cannot be told."""

    def __str__(self) -> str:
        raise ValueError("no words")


def _raise(error: BaseException) -> Callable[[], NoReturn]:
    def call() -> NoReturn:
        raise error

    return call


def _native_overflow() -> Any:
    """Leave no room on the stack: the interpreter counts no calls any more."""
    sys.setrecursionlimit(2**31 - 1)
    found: list[Any] = []
    for _ in range(1_000_000):
        found = [found]
    return repr(found)


ENDINGS: dict[str, Callable[[], Any]] = {
    "wordless": _raise(Wordless()),
    "stop_iteration": _raise(StopIteration("no more")),
    "memory": _raise(MemoryError("too much")),
    "native_overflow": _native_overflow,
    "exit_0": lambda: os._exit(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(LIMIT_SECONDS),
    "hang_native": lambda: ctypes.PyDLL(None).sleep(int(LIMIT_SECONDS)),  # keeps the GIL
}


# -- factories -------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Points on a line; reading sample `at` ends on rank `on` in the way `ending`.

    In a loader worker, ``workers_<rank>`` in `folder` gets its process and `split`.
    """

    def __init__(
        self, ending: str | None, on: int, at: int, folder: str | None = None, split: str = "train"
    ) -> None:
        self.ending, self.on, self.at = ending, on, at
        self.folder, self.split, self.told = folder, split, 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.ending and rank() == self.on and index >= self.at:
            ENDINGS[self.ending]()
        if self.folder is not None and self.told != os.getpid() and get_worker_info() is not None:
            self.told = os.getpid()
            tell(self.folder, f"workers_{rank()}", f"{self.told} {self.split}")
        x = torch.full((4,), index / NUM_SAMPLES)
        return x, x.sum()


@register.data("small")
def small_data(
    ending: str | None = None,
    on: int = 1,
    at: int = 0,
    evaluated: bool = False,
    folder: str | None = None,
) -> Data:
    """Return data that may end the process which reads it.

    Args:
        ending: a key of `ENDINGS`; None: nothing happens.
        on: the rank on which it happens.
        at: the first sample of which it happens.
        evaluated: whether in the validation data, else in the training data.
        folder: where loader workers say who they are; None: they do not.
    """
    first, second = (None, ending) if evaluated else (ending, None)
    return Data(
        Samples(first, on, at, folder, "train"), Samples(second, on, at, folder, "validation")
    )


@register.model("small")
def small_model(wait: str = "", folder: str = ".") -> nn.Module:
    """Return one layer; a rank waits here if `wait` is "start"."""
    if wait == "start":
        wait_in(folder, wait)
    return nn.Linear(4, 1)


@register.objective("small")
class Small(Objective):
    """Squared errors; ranks wait, or end, in the third step or in the first evaluation.

    Args:
        wait: "training" or "evaluation": ranks wait there.
        folder: where `wait_in` meets whoever waits for the ranks.
        ending: a key of `ENDINGS` that happens in the third step.
        on: the rank on which it happens; None: on all.
        evaluated: whether it happens in the first evaluation instead.
    """

    def __init__(
        self,
        wait: str = "",
        folder: str = ".",
        ending: str | None = None,
        on: int | None = 1,
        evaluated: bool = False,
    ) -> None:
        self.wait, self.folder, self.evaluated = wait, folder, evaluated
        self.ending, self.on, self.calls = ending, on, 0

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the squared error of each sample: [B]."""
        x, y = batch
        losses = (model(x).squeeze(-1) - y).square()
        phase = "training" if model.training else "evaluation"
        self.calls += model.training
        if phase == "evaluation" or self.calls == 3:
            here = self.on in (None, rank()) and self.evaluated == (phase == "evaluation")
            if self.ending and here:
                ENDINGS[self.ending]()
            if self.wait == phase:
                wait_in(self.folder, phase)
        return losses


@register.callback("small")
class Waiting(Callback):
    """Ranks wait in the save number `nth` if `wait` is "save"; `stops` leaves at its second step.

    Args:
        wait: "save" or nothing.
        folder: where `wait_in` meets whoever waits for the ranks.
        stops: a rank that leaves.
        nth: the save; 1: the first.
        tells: whether each rank appends its process and each of its steps to ``steps_<rank>``.
    """

    def __init__(
        self,
        wait: str = "",
        folder: str = ".",
        stops: int | None = None,
        nth: int = 1,
        tells: bool = False,
    ) -> None:
        self.wait, self.folder, self.stops = wait, folder, stops
        self.nth, self.tells, self.saves = nth, tells, 0

    def state_dict(self) -> Mapping[str, Any]:
        """Return nothing to save; called while a checkpoint is written."""
        self.saves += 1
        if self.wait == "save" and self.saves == self.nth:
            wait_in(self.folder, "save")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def on_step(self, loop: Any) -> None:
        """Tell the step; or leave the others alone."""
        if self.tells:
            tell(self.folder, f"steps_{rank()}", f"{os.getpid()} {loop.state.step}")
        if rank() == self.stops and loop.state.step == 2:
            loop.stop("rank alone")
