"""A process on a node of a Ray cluster: the class of the actor that starts and watches it.

The class goes to the node by value and needs nothing but Python there, so that neither a folder of
the user's nor another installation is taken for it. The process is a child of
the actor: it ends itself when the actor ends (`accel.machine.parent_watch`), as Ray lets actors
do when the command ends, is killed or loses the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TypedDict

# What `ProcessHost.events` returns: a kind, with a process id, (stream, bytes) or a status.
STARTED, OUTPUT, ENDED = "started", "output", "ended"
Event = tuple[str, "int | tuple[int, bytes]"]
# Threads of an actor: one waits for events, others start and signal the process.
CONCURRENCY = 4
HELD_BACK = ("SIGTERM", "SIGUSR1", "SIGINT")
FAILED_TO_START = 1
END_SECONDS = 10.0


class Site(TypedDict):
    """Where an actor is: its node with the address and the name, GPUs, and missing folders."""

    node: str
    address: str
    host: str
    gpus: list[str]
    missing: list[str]


class ProcessHost:
    """Starts one process on its node, passes signals and output on, and reports its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._queue: queue.Queue[Event] = queue.Queue()

    def place(self, folders: Sequence[str]) -> Site:
        """Return the node, the GPUs that Ray has assigned, and which of some folders it lacks."""
        import ray

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": platform.node(),
            "gpus": [str(one) for one in context.get_accelerator_ids().get("GPU", [])],
            "missing": [folder for folder in folders if not os.path.isdir(folder)],
        }

    def start(self, code: str, order: Mapping[str, object], content: bytes = b"") -> None:
        """Start a Python process that runs `code` with `order`, and with `content` as its input.

        The order gets the id of this process as "parent".
        """
        text = json.dumps({**order, "parent": os.getpid()})
        # Until it can handle them; it releases them itself.
        numbers = [getattr(signal, name) for name in HELD_BACK if hasattr(signal, name)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._queue.put((OUTPUT, (2, f"{error}\n".encode())))
            self._queue.put((ENDED, FAILED_TO_START))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._queue.put((STARTED, self._process.pid))
        threading.Thread(target=self._watch, args=(content,), daemon=True).start()

    def _watch(self, content: bytes) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(number, stream), daemon=True)
            for number, stream in ((1, process.stdout), (2, process.stderr))
        ]
        for reader in readers:
            reader.start()
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(content)
        status = process.wait()
        with contextlib.suppress(ProcessLookupError):  # data loaders of one that crashed
            os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join(END_SECONDS)
        self._queue.put((ENDED, status))

    def _read(self, number: int, stream: IO[bytes]) -> None:
        while content := os.read(stream.fileno(), 1 << 16):
            self._queue.put((OUTPUT, (number, content)))

    def events(self, seconds: float) -> list[Event]:
        """Return what has happened since the last call; wait up to so many seconds for it."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._queue.get(timeout=seconds))
            while True:
                found.append(self._queue.get_nowait())
        return found

    def send(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
