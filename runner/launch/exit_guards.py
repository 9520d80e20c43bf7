"""Guards against user code that ends the process as if the run was complete. Free of torch."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from accel.machine.errors import AccelError
from runner.exit_codes import FAILED
from runner.run_dir.outcomes import describe_exit
from runner.training.stopping import StopFlag

_REPLACING = ("execv", "execve")


class EndedByOwnCodeError(RuntimeError):
    """The user's code ended the process before the run was complete."""


class LoaderWorkerError(AccelError, RuntimeError):
    """A loader worker died; the message has its exit status."""


@contextlib.contextmanager
def silent_exit_refused() -> Iterator[None]:
    """Raise an `EndedByOwnCodeError` where code in the context would end this process silently.

    That is `os._exit(0)`, with which an untrained run would look complete, and `os.exec*`, also by
    the module `posix` that `os` takes them from. Child processes are not affected.
    """
    owner, exit_now = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        if status == 0 and os.getpid() == owner:
            if threading.current_thread() is threading.main_thread():
                raise EndedByOwnCodeError("os._exit(0) was called before the run was complete")
            print("os._exit(0) was called before the run was complete", file=sys.stderr, flush=True)
            status = FAILED
        exit_now(status)

    def replacing(replace: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def call(*arguments: object) -> NoReturn:
            if os.getpid() == owner:
                raise EndedByOwnCodeError(
                    f"os.{replace.__name__}({arguments[0]!r}, …) would replace the training process"
                )
            replace(*arguments)

        return call

    guards = {"_exit": leave, **{name: replacing(getattr(os, name)) for name in _REPLACING}}
    # `os.name` is the name of that module; a user's folder `nt` may be importable, too.
    places = [os, sys.modules[os.name]]
    before = [(place, name, getattr(place, name)) for place in places for name in guards]
    try:
        for place, name, _ in before:
            setattr(place, name, guards[name])
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


@contextlib.contextmanager
def explained(stop: StopFlag) -> Iterator[None]:
    """Name the cause of an end of the process where Python or torch does not.

    Raises an `EndedByOwnCodeError` where `silent_exit_refused` does, and for a KeyboardInterrupt
    without a Ctrl-C; a `LoaderWorkerError` where torch only reports that a loader worker exited.
    """
    try:
        with silent_exit_refused():
            yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        from accel.data.worker_signals import failed

        ended = [f"{pid} {describe_exit(status)}" for pid, status in failed().items()]
        if not ended:
            raise
        raise LoaderWorkerError(f"a loader worker died: process {', '.join(ended)}") from error
    except KeyboardInterrupt as error:
        if stop.interrupted:
            raise
        raise EndedByOwnCodeError("KeyboardInterrupt was raised without a Ctrl-C") from error
