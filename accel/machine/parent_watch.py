"""Workers end when the process that started them is killed.

A SIGKILL cannot be handled, so the parent cannot notify its workers. Each of them waits for the
parent's end in a thread, and then kills its own process group, in which its data-loading children
live, too. Free of torch.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

POLL_SECONDS = 0.5


def die_with(parent: int) -> threading.Thread:
    """Kill this process's group once its parent has ended; return the thread that waits."""
    return _kill_group_after(parent, lambda: os.getppid() == parent)


def die_with_ancestor(ancestor: int) -> threading.Thread:
    """Kill this process's group once `ancestor`, perhaps not its parent, has ended."""
    return _kill_group_after(ancestor, lambda: _exists(ancestor))


def die_alone_with(parent: int) -> threading.Thread:
    """Kill this process, not its group, once its parent has ended: a launcher made the group."""
    return _call_after(
        parent, lambda: os.getppid() == parent, lambda: os.kill(os.getpid(), signal.SIGKILL)
    )


def _kill_group_after(process: int, is_alive: Callable[[], bool]) -> threading.Thread:
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    return _call_after(process, is_alive, lambda: os.killpg(0, signal.SIGKILL))


def _call_after(
    process: int, is_alive: Callable[[], bool], end: Callable[[], None]
) -> threading.Thread:
    def wait_and_end() -> None:
        wait_for_end(process, is_alive)
        end()

    thread = threading.Thread(target=wait_and_end, name=f"watch of {process}", daemon=True)
    thread.start()
    return thread


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(process: int, is_alive: Callable[[], bool]) -> None:
    """Return when a process has ended; `is_alive`: whether the id is still its own."""
    try:
        file = os.pidfd_open(process)
    except (AttributeError, OSError):  # not Linux, an old kernel, a sandbox; or it has ended
        while is_alive():
            time.sleep(POLL_SECONDS)
        return
    try:
        # The id may have been reused before it was opened.
        if is_alive():
            waiter = select.poll()  # `select.select` takes no file above number 1023
            waiter.register(file, select.POLLIN)
            waiter.poll()
    finally:
        os.close(file)
