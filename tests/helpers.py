"""Run a function on several processes, in a warm pool of workers per world size.

Workers are forked from one server that has imported torch: a fork costs milliseconds, a fresh
start seconds. Start-up itself is tested with fresh launches in
`tests/runner/launch/test_launcher.py`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

GRACE_SECONDS = 5.0
START_METHOD = "forkserver"  # the mutation gate forks, so that workers are mutants, too
ROOT = Path(__file__).resolve().parents[1]
_STARTING = threading.Lock()
# Of the fork server: no test has changed it. Torch looks for GPUs without starting CUDA, which
# forks could not use.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
MAX_SECONDS = float("inf")
# Until something counts as hanging: a busy machine takes twenty times what an idle one takes.
START_SECONDS = 240.0
SECONDS = 300.0
# Of gloo's in a warm worker, each of which wakes up a hundred times a second for nothing: what a
# script's end would let go of (groups that DeepSpeed or a model holds) stays in a worker.
MOST_THREADS = 24
_held_ports: collections.deque[socket.socket] = collections.deque(maxlen=64)


class WorkerError(AssertionError):
    """A function failed on a rank; carries the traceback of the rank that failed first."""


def alive(pid: int) -> bool:
    """Return whether a process runs; one that merely waits to be collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def about(losses: Any, rel: float = 1e-5) -> Any:
    """Return what equals `losses` of the same training whose sums were in another order.

    Within `rel` of each, and within 1e-5: a cross-entropy is a difference of logits, and the
    rounding of those does not shrink with it.
    """
    return pytest.approx(losses, rel=rel, abs=1e-5)


def free_port() -> int:
    """Return a TCP port that nobody listens on, and that nobody else is given meanwhile.

    It stays bound here: neither a connection nor another call takes it, while a server that sets
    SO_REUSEADDR, as all do that are tested here, can listen on it.
    """
    while True:
        port = secrets.randbelow(20_000) + 10_000
        held = socket.socket()
        try:
            held.bind(("", port))
        except OSError:
            held.close()
            continue
        # Only now: with it from the start, two callers could hold the same port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if len(_held_ports) == _held_ports.maxlen:
            _held_ports.popleft().close()
        _held_ports.append(held)
        return port


def gloo_threads(pid: int | None = None) -> int:
    """Return how many threads gloo has started in this process, or another (Linux; else 0)."""
    names = []
    for path in Path(f"/proc/{pid or 'self'}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text())
    return sum("gloo" in name for name in names)


def gloo_threads_left(most: int) -> int:
    """Return `gloo_threads` once there are at most so many, or after some seconds all the same.

    A thread that is joined is listed by the system for a moment longer.
    """
    deadline = time.monotonic() + 5.0
    while gloo_threads() > most and time.monotonic() < deadline:
        time.sleep(0.02)
    return gloo_threads()


def reset_accel() -> None:
    """Forget accel's shared state and leave the process group, if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        gc.collect()  # what holds a reducer of the group goes first; dear, so only here
        dist.destroy_process_group()
    if "accel.state" not in sys.modules:
        return
    if "accel.strategies.deepspeed.initialize" in sys.modules and "deepspeed" in sys.modules:
        from accel.strategies.deepspeed import initialize

        initialize.restore_linear(sys.modules["deepspeed"])  # of a run that was not ended
    from accel.logging import MultiProcessAdapter
    from accel.state import AcceleratorState, GradientState, PartialState

    if PartialState._shared_state:  # transformers asks a strategy that something still holds
        PartialState().comm.closed = True
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
    for name in _modules_of_ours(len(sys.modules)):
        logger = vars(sys.modules[name]).get("logger") if name in sys.modules else None
        if isinstance(logger, MultiProcessAdapter):
            logger._seen.clear()  # each test is warned anew


@functools.lru_cache(maxsize=1)  # there are thousands of others
def _modules_of_ours(num_modules: int) -> list[str]:
    """Return the names of our modules, of `num_modules` that are imported."""
    return [name for name in sys.modules if name.startswith(("accel.", "runner."))]


def start_fork_server() -> None:
    """Start the process that workers are forked from, unless it runs."""
    with _STARTING:
        _fork_server()


@functools.cache
def _fork_server() -> None:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    try:
        with contextlib.chdir(ROOT):  # its first folder of modules
            multiprocessing.set_forkserver_preload(["tests.preloaded"])
            multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(pipe: Connection, rank: int) -> None:
    import torch

    from tests import preloaded  # done before, if this was forked

    assert preloaded
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # not the server's: as in a fresh process
    pipe.send("ready")
    while True:
        try:
            environment, function, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            answer = (True, function(*args), time.time())
        except BaseException:
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}", time.time())
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, f"rank {rank}: result\n{traceback.format_exc()}", time.time()))
        try:
            pipe.recv()  # all have answered: nobody is cut off from a group that others still build
        except (EOFError, ConnectionError):
            return
        reset_accel()
        os.environ.clear()
        os.environ.update(before)
        pipe.send("ready")


def _first_of(failures: list[tuple[bool, str, float]]) -> str:
    """Return who died, which the others may have noticed before it is seen here, and the first."""
    died = [text for _, text, _ in failures if re.match(r"rank \d+ died", text)]
    told = [failure for failure in failures if failure[1] not in died]
    return "\n".join([*died, *(text for _, text, _ in sorted(told, key=lambda each: each[2])[:1])])


class _Pool:
    """`world_size` processes that wait for functions."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context(START_METHOD)
        self.world_size = world_size
        self.pipes: list[Connection] = []
        self.processes = []
        if START_METHOD == "forkserver":
            start_fork_server()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), name=f"pool-{rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.collect(START_SECONDS)

    def collect(self, timeout: float) -> list[Any]:
        """Return one message per rank, or end the pool and raise."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        failed_at: float | None = None
        while len(answers) < self.world_size:
            limit = deadline if failed_at is None else min(deadline, failed_at + GRACE_SECONDS)
            waiting = [self.pipes[r] for r in range(self.world_size) if r not in answers]
            ready = wait(waiting, timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.processes[rank].join(GRACE_SECONDS)
                    code = self.processes[rank].exitcode
                    answers[rank] = (False, f"rank {rank} died (exit code {code})", time.time())
                if isinstance(answers[rank], tuple) and not answers[rank][0]:
                    failed_at = failed_at or time.monotonic()
        failures = [a for a in answers.values() if isinstance(a, tuple) and not a[0]]
        missing = [rank for rank in range(self.world_size) if rank not in answers]
        if missing:
            self.kill()
        if failures:
            raise WorkerError(_first_of(failures))
        if missing:
            raise WorkerError(f"ranks {missing} gave no answer within {timeout} s")
        return [answers[rank] for rank in range(self.world_size)]

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        """Run `function(*args)` on every rank and return the results by rank."""
        port = str(free_port())
        for rank, pipe in enumerate(self.pipes):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            pipe.send((environment, function, args))
        try:
            results = self.collect(timeout)
            for pipe in self.pipes:
                pipe.send("leave")
            self.collect(START_SECONDS)
        except (WorkerError, ConnectionError):
            self.kill()
            raise
        if any(gloo_threads(process.pid) > MOST_THREADS for process in self.processes):
            self.kill()
        return [result for _, result, _ in results]

    def kill(self) -> None:
        """End the processes and forget the pool."""
        _POOLS.pop(self.world_size, None)
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join(10)


_POOLS: dict[int, _Pool] = {}


def pool_pids() -> set[int]:
    """Return the process ids of all warm workers."""
    return {process.pid for pool in _POOLS.values() for process in pool.processes if process.pid}


def close_pools() -> None:
    """End every warm worker."""
    for pool in list(_POOLS.values()):
        pool.kill()


atexit.register(close_pools)


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = SECONDS
) -> list[Any]:
    """Run a module-level function on `world_size` processes.

    Args:
        function: importable; sees RANK, WORLD_SIZE, … as torchrun sets them, and no process group.
        world_size: number of processes.
        args: picklable arguments, the same on every rank.
        timeout: seconds.

    Returns:
        What the function returned, by rank.

    Raises:
        WorkerError: with who died and the earliest traceback, or the ranks that gave no answer.
    """
    if world_size not in _POOLS:
        _POOLS[world_size] = _Pool(world_size)
    return _POOLS[world_size].call(function, args, min(timeout, MAX_SECONDS))


def python(*args: str) -> list[str]:
    """Return the command that runs this interpreter with `args`."""
    return [sys.executable, *args]


def with_path(**variables: str) -> dict[str, str]:
    """Return the environment of a command that imports this checkout, with further variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def ran(
    line: Sequence[str], cwd: Path, timeout: float = SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end."""
    known: Any = {"env": with_path(**variables), "capture_output": True, "text": True}
    return subprocess.run(line, cwd=cwd, timeout=timeout, **known)


def started(line: Sequence[str], cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command in a folder; both outputs are its standard output."""
    known: Any = {"env": with_path(**variables), "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, cwd=cwd, stdout=subprocess.PIPE, **known)


def write_file(path: Path, text: str) -> Path:
    """Write a file, and the folders above it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def git(folder: Path, *arguments: str) -> None:
    """Give a command of git's in a folder."""
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def wait_until(condition: Callable[[], object], within: float = SECONDS) -> bool:
    """Return whether `condition()` becomes true in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def on_small_disk(folder: Path, size: str, *command: str) -> list[str]:
    """Return `command` as one that sees a disk of its own of so many bytes at `folder`.

    Args:
        folder: exists.
        size: as `mount` takes it, e.g. "300k".
        command: what runs there.
    """
    mount = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *command]


def small_disks_work(folder: Path) -> bool:
    """Return whether this machine lets a process mount a disk of its own."""
    try:
        command = on_small_disk(folder, "64k", "true")
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False
