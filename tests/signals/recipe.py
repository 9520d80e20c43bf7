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
from torch.utils.data import Dataset

from accel.env import Environment
from runner import Callback, Data, Objective, register

LIMIT_SECONDS = 600.0
NUM_SAMPLES = 64


def rank() -> int:
    """Return this process's rank; 0 where it is alone."""
    return Environment.read().rank or 0


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


def _unpicklable() -> NoReturn:
    class Local(Exception):
        pass

    raise Local("not to be pickled")


def _raise(error: BaseException) -> Callable[[], NoReturn]:
    def call() -> NoReturn:
        raise error

    return call


def _overflow() -> Any:
    return _overflow() + 1


def _native_overflow() -> Any:
    """Leave no room on the stack: the interpreter counts no calls any more."""
    sys.setrecursionlimit(2**31 - 1)
    found: list[Any] = []
    for _ in range(1_000_000):
        found = [found]
    return repr(found)


def _close_files() -> None:
    os.closerange(3, 4096)
    raise OSError("no files are left")


ENDINGS: dict[str, Callable[[], Any]] = {
    "value": _raise(ValueError("the cause")),
    "wordless": _raise(Wordless()),
    "stop_iteration": _raise(StopIteration("no more")),
    "generator_exit": _raise(GeneratorExit("out")),
    "interrupt": _raise(KeyboardInterrupt("by hand")),
    "memory": _raise(MemoryError("too much")),
    "unpicklable": _unpicklable,
    "overflow": _overflow,
    "native_overflow": _native_overflow,
    "sys_exit_0": lambda: sys.exit(0),
    "exit_0": lambda: os._exit(0),
    "exit_3": lambda: os._exit(3),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "close_files": _close_files,
    "hang": lambda: time.sleep(LIMIT_SECONDS),
    "hang_native": lambda: ctypes.PyDLL(None).sleep(int(LIMIT_SECONDS)),  # keeps the GIL
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


# -- factories -------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Points on a line; reading sample `at` ends on rank `on` in the way `ending`."""

    def __init__(self, ending: str | None, on: int, at: int) -> None:
        self.ending, self.on, self.at = ending, on, at

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.ending and rank() == self.on and index >= self.at:
            ENDINGS[self.ending]()
        x = torch.full((4,), index / NUM_SAMPLES)
        return x, x.sum()


@register.data("small")
def small_data(
    ending: str | None = None, on: int = 1, at: int = 0, evaluated: bool = False
) -> Data:
    """Return data that may end the process which reads it.

    Args:
        ending: a key of `ENDINGS`; None: nothing happens.
        on: the rank on which it happens.
        at: the first sample of which it happens.
        evaluated: whether in the validation data, else in the training data.
    """
    plain, ending_set = Samples(None, on, at), Samples(ending, on, at)
    return Data(plain, ending_set) if evaluated else Data(ending_set, plain)


@register.model("small")
def small_model(wait: str = "", folder: str = ".") -> nn.Module:
    """Return one layer; a rank waits here if `wait` is "start"."""
    if wait == "start":
        wait_in(folder, wait)
    return nn.Linear(4, 1)


@register.model("main_first")
def main_first(folder: str) -> nn.Module:
    """Return a language model of transformers; rank 0 loads it first, while the others wait.

    Args:
        folder: what `save_pretrained` has written.
    """
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    if rank() > 0:
        dist.barrier()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    if rank() == 0:
        dist.barrier()
    return model


@register.objective("small")
class Small(Objective):
    """Squared errors; ranks wait, or end, in the third step or in the first evaluation.

    Args:
        wait: "training" or "evaluation": ranks wait there.
        folder: where `wait_in` meets whoever waits for the ranks.
        ending: a key of `ENDINGS` that happens in the third step.
        on: the rank on which it happens.
        evaluated: whether it happens in the first evaluation instead.
    """

    def __init__(
        self,
        wait: str = "",
        folder: str = ".",
        ending: str | None = None,
        on: int = 1,
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
            if self.ending and rank() == self.on and self.evaluated == (phase == "evaluation"):
                ENDINGS[self.ending]()
            if self.wait == phase:
                wait_in(self.folder, phase)
        return losses


@register.callback("small")
class Waiting(Callback):
    """Ranks wait in the first save if `wait` is "save"; rank `stops` leaves at its second step."""

    def __init__(self, wait: str = "", folder: str = ".", stops: int | None = None) -> None:
        self.wait, self.folder, self.stops = wait, folder, stops

    def state_dict(self) -> Mapping[str, Any]:
        """Return nothing to save; called while a checkpoint is written."""
        if self.wait == "save":
            wait_in(self.folder, "save")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def on_step(self, loop: Any) -> None:
        """Leave the others alone."""
        if rank() == self.stops and loop.state.step == 2:
            loop.stop("rank alone")
