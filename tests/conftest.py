"""Every test starts with a clean engine and must leave the process as it found it."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: tests run side by side, and idle threads of OpenMP's wait busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests import helpers, slurm, tiers
from tests.helpers import close_pools, pool_pids, reset_accel

# Set by libraries at import, or by pytest itself.
IGNORED_VARIABLES = {
    *("PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "COLUMNS"),
    *("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"),
    "XLA_USE_SPMD",  # of torch_xla, with several devices
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # deepspeed, which transformers imports to save a model
}
GPU_CHOSEN = re.compile(r"(?<!not )\bgpu\b")
# Threads that libraries keep on purpose, once per process.
IGNORED_THREADS = ("pydevd", "QueueFeederThread", "tqdm", "ThreadPoolExecutor", "asyncio")
# Processes that multiprocessing keeps, and ends with the session.
IGNORED_PROCESSES = ("resource_tracker", "multiprocessing.forkserver")
# What tests say that start processes, and wait for them.
STARTING = re.compile(r"run_distributed|subprocess|python\(|cli\.main|luster|processes|launch")
MANY_MODULES = 100  # imported since the collector was last spared what is there
_FROZEN = [0]  # how many modules there were whenever it was

# A busy machine stalls any example. All else stays as whoever started the tests has set it.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, unless their tests are chosen: the others are about processes and the CPU."""
    tiers.begin()
    if GPU_CHOSEN.search(config.option.markexpr) or not Path("/dev/nvidiactl").exists():
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = helpers.ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count what is `long` among the slow tests."""
    if item.get_closest_marker("long"):
        item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no slow test after the deadline."""
    tiers.require_time(item)


@pytest.hookimpl(trylast=True)  # of the tests that are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, and skip what needs a GPU, or Slurm, where there is none."""
    _sort_longest_first(items)
    on_slurm = [item for item in items if item.get_closest_marker("slurm")]
    if on_slurm and (reason := slurm.missing()):
        for item in on_slurm:
            item.add_marker(pytest.mark.skip(reason=reason))
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or hidden: pytest -m gpu"))


def _sort_longest_first(items: list[pytest.Item]) -> None:
    """Order files by the time that a test may take, whether they start processes, and their tests.

    Each worker takes one file after the other: a long one at the end would be waited for alone.
    """
    longest: dict[Path, float] = {}
    counts: Counter[Path] = Counter()
    for item in items:
        allowed = item.get_closest_marker("timeout")
        seconds = float(allowed.args[0]) if allowed else 0.0
        longest[item.path] = max(longest.get(item.path, 0.0), seconds)
        counts[item.path] += 1
    starting = {path: bool(STARTING.search(path.read_text("utf-8"))) for path in counts}
    items.sort(
        key=lambda item: (
            tiers.shuffled(item.path),
            -longest[item.path],
            not starting[item.path],
            -counts[item.path],
            item.path,
        )
    )


def pytest_collection_finish() -> None:
    """Spare the collector what all tests have imported: it would look at it again and again."""
    gc.collect()
    gc.freeze()
    _FROZEN.append(len(sys.modules))


def children() -> dict[int, str]:
    """Return the command lines of this process's children, by process id (Linux; else empty)."""
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids = task.read_text().split()
        except OSError:  # the thread is gone
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command and not any(name in command for name in IGNORED_PROCESSES):
                found[int(pid)] = command
    return found


def leaks(variables: dict[str, str], threads: set[threading.Thread], pids: set[int]) -> list[str]:
    """Return what is there now and was not before."""
    found = []
    for name in {*variables, *os.environ} - IGNORED_VARIABLES:
        if variables.get(name) != os.environ.get(name):
            found.append(f"environment {name}: {variables.get(name)!r} → {os.environ.get(name)!r}")
    for thread in set(threading.enumerate()) - threads:
        if thread.is_alive() and not thread.name.startswith(IGNORED_THREADS):
            found.append(f"thread {thread.name}")
    for pid, command in children().items():
        if pid not in pids and pid not in pool_pids():
            found.append(f"process {pid}: {command}")
    return found


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves an environment variable, a thread or a process behind."""
    reset_accel()
    variables, threads, pids = dict(os.environ), set(threading.enumerate()), set(children())
    yield
    reset_accel()
    found = leaks(variables, threads, pids)
    deadline = time.monotonic() + 3.0
    while found and time.monotonic() < deadline:  # threads and processes may be on their way out
        time.sleep(0.05)
        found = leaks(variables, threads, pids)
    if found:
        os.environ.clear()
        os.environ.update(variables)
        pytest.fail("the test leaked: " + "; ".join(found))


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Spare the collector what tests have imported since: a full collection would take a second."""
    if len(sys.modules) > _FROZEN[-1] + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _FROZEN.append(len(sys.modules))


@pytest.fixture(scope="session", autouse=True)
def warm_pools() -> Iterator[None]:
    """End the warm workers with the session."""
    yield
    close_pools()
