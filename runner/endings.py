"""No run ends as if it was complete before it is: what the user's code may do to the process.

Free of torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from runner.outcomes import FAILED
from runner.signals import StopFlag

_REPLACING = ("execv", "execve")


class EndedByOwnCodeError(RuntimeError):
    """The run's own code asked for the end of the process before the run was complete."""


@contextlib.contextmanager
def told(stop: StopFlag) -> Iterator[None]:
    """Raise an `EndedByOwnCodeError` where code in the context would end this process silently.

    That is `os._exit(0)`, with which an untrained run would look complete, `os.exec*`, and a
    KeyboardInterrupt that no Ctrl-C has raised. Child processes are left alone.

    Args:
        stop: knows whether Ctrl-C was pressed.
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
        def call(*arguments: Any) -> NoReturn:
            if os.getpid() == owner:
                raise EndedByOwnCodeError(
                    f"os.{replace.__name__}({arguments[0]!r}, …) would replace the training process"
                )
            replace(*arguments)

        return call

    before = {name: getattr(os, name) for name in ("_exit", *_REPLACING)}
    try:
        os._exit = leave
        for name in _REPLACING:
            setattr(os, name, replacing(before[name]))
        yield
    except KeyboardInterrupt as error:
        if stop.interrupted:
            raise
        raise EndedByOwnCodeError("KeyboardInterrupt was raised without a Ctrl-C") from error
    finally:
        for name, function in before.items():
            setattr(os, name, function)
