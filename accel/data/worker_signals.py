"""Loader workers and the signals that ask a run to stop.

Schedulers (`scancel`), service managers (systemd) and `timeout` send a stop signal to every process
of a job. The training process handles it: it saves and ends. Its loader workers would die of it and
take the training process along before it has saved. So a worker ignores the signals that the
training process handles in Python, and ends when the training process ends it, or is gone.

Source: https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.queues
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

POLL_SECONDS = 1.0
# What people, schedulers and service managers send to all processes of a job.
SENT_TO_ALL: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")
    if hasattr(signal, name)
)


def handled_here() -> tuple[signal.Signals, ...]:
    """Return the signals of `SENT_TO_ALL` that this process handles in Python."""
    return tuple(number for number in SENT_TO_ALL if callable(signal.getsignal(number)))


@dataclass(frozen=True)
class WorkerStart:
    """The `worker_init_fn` of a worker that ignores the signals `handled` by its training process.

    The user's own one, `then`, is called last; what it sets stays.
    """

    handled: tuple[signal.Signals, ...]
    then: Callable[[int], object] | None = None

    def __call__(self, worker_id: int) -> None:
        """Set up this process, the worker `worker_id`."""
        for number in self.handled:
            # Not SIG_IGN, which programs that the data set starts would inherit: these could then
            # not be terminated. System calls are restarted.
            signal.signal(number, _outlive)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.handled)
        watch = threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True)
        watch.start()
        if faulthandler.is_enabled():  # torch's handlers have taken the place of its own
            faulthandler.disable()
            faulthandler.enable()
        multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_give_up)  # type: ignore[attr-defined]
        if self.then is not None:
            self.then(worker_id)


def _outlive(number: int, frame: FrameType | None) -> None:
    """Do nothing: the training process decides when its workers end."""


def _give_up(error: BaseException, batch: object) -> None:
    """End this worker, whose batch cannot be pickled: the training process would wait for ever."""
    traceback.print_exception(error)
    os._exit(1)


def _end_with(parent: int) -> None:
    """Kill this process once `parent` is gone, whatever its main thread does."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def starting(loader: DataLoader[object]) -> Iterator[None]:
    """Have the workers that `loader` starts in the context outlive the stop signals.

    These are held back in this thread meanwhile, and by inheritance in the workers until they
    ignore them: torch's own handler would let a worker die that is yet to be set up.
    """
    numbers = handled_here()
    if loader.num_workers == 0 or not numbers:
        yield
        return
    users = loader.worker_init_fn
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    loader.worker_init_fn = WorkerStart(numbers, users)
    try:
        yield
    finally:
        loader.worker_init_fn = users
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def supervised(iterator: Any) -> Any:
    """Return a loader's `iterator`, whose workers can be ended though they ignore SIGTERM.

    Torch and `multiprocessing` terminate workers that do not end by themselves, and then wait for
    them without limit.
    """
    workers = getattr(iterator, "_workers", ())
    for process in workers:
        process.terminate = process.kill
    if workers:
        _RUNNING.add(iterator)
        # Now, so that it runs before what torch has registered while it built the iterator.
        atexit.unregister(_shut_down)
        atexit.register(_shut_down)
    return iterator


def failed() -> dict[int, int]:
    """Return the exit status of each worker of a live iterator that failed, by process id.

    A negative status is minus the number of the signal that ended it.
    """
    processes = [process for iterator in list(_RUNNING) for process in iterator._workers]
    return {process.pid: process.exitcode for process in processes if process.exitcode}


_RUNNING: weakref.WeakSet[Any] = weakref.WeakSet()


def _shut_down() -> None:
    """Let the workers of persistent and of abandoned iterators end when the process ends."""
    for iterator in list(_RUNNING):
        iterator._shutdown_workers()
