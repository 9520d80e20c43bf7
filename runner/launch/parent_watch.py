"""No process outlives its parent: what a worker does when the process that started it is killed.

A SIGKILL cannot be handled, so the parent cannot tell its workers. Each of them waits for the
parent's end in a thread, and then kills its own process group, in which its data-loading children
live, too. Free of torch.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

POLL_SECONDS = 0.5


def lead_own_group() -> None:
    """Make this process the leader of a process group, unless it is one."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def die_with(parent: int) -> threading.Thread:
    """Kill this process's group as soon as the process `parent`, which started it, is gone.

    Args:
        parent: process id of the parent.

    Returns:
        The thread that waits.
    """
    lead_own_group()
    thread = threading.Thread(target=_wait_and_kill, args=(parent,), name="parent", daemon=True)
    thread.start()
    return thread


def die_with_ancestor(ancestor: int) -> threading.Thread:
    """Kill this process's group as soon as `ancestor`, which need not be its parent, is gone.

    Args:
        ancestor: process id.

    Returns:
        The thread that waits.
    """
    lead_own_group()
    thread = threading.Thread(target=_poll_and_kill, args=(ancestor,), name="ancestor", daemon=True)
    thread.start()
    return thread


def _poll_and_kill(ancestor: int) -> None:
    try:
        file = os.pidfd_open(ancestor)
    except AttributeError:  # not Linux
        while _exists(ancestor):
            time.sleep(POLL_SECONDS)
    except OSError:  # it is gone, or a sandbox
        while _exists(ancestor):
            time.sleep(POLL_SECONDS)
    else:
        select.select([file], [], [])
        os.close(file)
    os.killpg(0, signal.SIGKILL)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_and_kill(parent: int) -> None:
    wait_for_end(parent)
    os.killpg(0, signal.SIGKILL)


def wait_for_end(parent: int) -> None:
    """Return when `parent` is no longer the parent of this process."""
    try:
        file = os.pidfd_open(parent)
    except (AttributeError, OSError):  # not Linux, an old kernel, a sandbox; or it is gone
        _poll_for_end(parent)
        return
    try:
        # The number may have been given to another process before it was opened.
        if os.getppid() == parent:
            waiter = select.poll()  # `select.select` takes no file above number 1023
            waiter.register(file, select.POLLIN)
            waiter.poll()
    finally:
        os.close(file)


def _poll_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
