"""Run a command of Python's in a fork of the server that has imported torch.

It has arguments, folder, environment, output and exit code of its own, like a fresh process, and
saves the seconds of a start. Tests about starting, importing, signals or orphans start processes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path

from tests.helpers import SECONDS, start_fork_server


def run(
    *arguments: str, cwd: Path, environment: Mapping[str, str], timeout: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run what ``python`` would run, to its end.

    Args:
        arguments: of the interpreter: ``-m module …``, ``-c code …`` or a script and its own.
        cwd: the working directory.
        environment: all of its variables.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: when it was killed for taking longer, with its children.
    """
    start_fork_server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (str(Path(folder) / name) for name in ("out", "err"))
        task = (list(arguments), str(cwd), dict(environment), out, err)
        fork = multiprocessing.get_context("forkserver").Process(target=_become, args=task)
        fork.start()
        fork.join(timeout)
        code = fork.exitcode
        if code is None:
            os.killpg(fork.pid or 0, signal.SIGKILL)
            fork.join()
        texts = [Path(path).read_text() for path in (out, err)]
        fork.close()
    if code is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, *texts)
    return subprocess.CompletedProcess(list(arguments), code, *texts)


def _become(
    arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str
) -> None:
    """Be a fresh interpreter; never return."""
    import numpy

    os.setsid()  # what it starts ends with it
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _forget_parent()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    numpy.random.seed()
    sys.orig_argv = [sys.executable, *arguments]
    code = _exit_code(arguments, environment)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _forget_parent() -> None:
    """Let multiprocessing take this for a main process, which has no servers yet."""
    for server in (resource_tracker._resource_tracker, forkserver._forkserver):
        server.__init__()  # type: ignore[misc]
    multiprocessing.set_start_method(None, force=True)
    process.current_process().name = "MainProcess"
    process._parent_process = None  # type: ignore[attr-defined]


def _exit_code(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the main program; return the interpreter's exit code."""
    try:
        _run_main(list(arguments), environment.get("PYTHONPATH", ""))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_main(arguments: list[str], path: str) -> None:
    kind, *rest = arguments
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    sys.path[:0] = [first, *filter(None, path.split(os.pathsep))]
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
