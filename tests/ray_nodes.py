"""A Ray cluster of several nodes on this machine, for tests.

The cluster lives in a process of its own (``python -m tests.ray_nodes CPUS NODES``), which ends it
when its standard input is closed: whatever becomes of the tests, nothing stays behind.

Source: https://docs.ray.io/en/latest/ray-core/examples/testing-tips.html
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests import helpers
from tests.helpers import ROOT, SECONDS, alive, python

MEMORY = 80 * 2**20  # of the object store of a node: the least that Ray takes
END_SECONDS = 60.0
Test = TypeVar("Test", bound=Callable[..., None])


def missing() -> str:
    """Return why no cluster can be started here, or ""."""
    return "" if importlib.util.find_spec("ray") else "ray is not installed (.[ray])"


def in_a_cluster(test: Test) -> Test:
    """Mark a test that uses the fixture `nodes`: it takes long, and needs Ray."""
    skip = pytest.mark.skipif(bool(missing()), reason=missing())
    return pytest.mark.slow(skip(test))


class Cluster:
    """A running cluster, by the pipes of its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # Ray prints there, too
            if line.startswith("answer "):
                return line.split()[1]
        raise AssertionError("the cluster has ended")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def kill_node(self) -> None:
        """Kill the newest node, as a power cut would."""
        self._ask("kill")

    def kill_head(self) -> None:
        """Kill the server of the head, which knows all nodes and actors."""
        self._ask("kill head")

    def add_node(self) -> None:
        """Add a node; return when the cluster knows all nodes that are there, and no others."""
        self._ask("add")

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command of the runner's in the cluster; both outputs are its standard output."""
        return subprocess.Popen(
            python("-m", "runner", *arguments),
            cwd=cwd,
            env=helpers.with_path(RAY_ADDRESS=self.address, OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_heard,
            start_new_session=True,
        )

    def run(self, *arguments: str, cwd: Path) -> tuple[int, str]:
        """Run a command to its end; return its exit code and output."""
        return ended(self.start(*arguments, cwd=cwd))


def _heard() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever pytest was started with


def ended(command: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a command's end; return its exit code and output."""
    try:
        output, _ = command.communicate(timeout=SECONDS)
    except BaseException:
        command.kill()
        print(command.communicate()[0])
        raise
    return command.returncode, output


def wait_until(happened: Callable[[], bool], command: subprocess.Popen[str]) -> None:
    """Wait until something has happened, while a command runs."""
    deadline = time.monotonic() + SECONDS
    try:
        while not happened():
            assert command.poll() is None, command.returncode
            assert time.monotonic() < deadline
            time.sleep(0.05)
    except BaseException:
        command.kill()
        print(command.communicate()[0])
        raise


def wait_for_end_of(pids: Iterable[int]) -> None:
    """Wait until none of some processes runs any more."""
    wanted = list(pids)
    assert helpers.wait_until(lambda: not any(map(alive, wanted))), list(filter(alive, wanted))


@contextlib.contextmanager
def cluster(cpus: int = 2, nodes: int = 2) -> Iterator[Cluster]:
    """Run a cluster of `nodes` nodes that have `cpus` CPUs each, as far as Ray knows."""
    process = subprocess.Popen(
        python("-m", "tests.ray_nodes", str(cpus), str(nodes)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=helpers.with_path(RAY_USAGE_STATS_ENABLED="0"),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield Cluster(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(END_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def processes(address: str) -> list[str]:
    """Return the command lines of a cluster's processes on this machine."""
    port = address.rpartition(":")[2]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if port in line and any(name in line for name in ("raylet", "gcs_server", "/ray/")):
                found.append(line[:200])
    return found


def main(cpus: int, number: int) -> None:
    """Be the process of a cluster until standard input ends."""
    from ray.cluster_utils import Cluster as Nodes

    options = {"num_cpus": cpus, "object_store_memory": MEMORY, "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=options)
    try:
        added = [nodes.add_node(**options) for _ in range(number - 1)]
        nodes.wait_for_nodes()
        print(f"answer {nodes.address}", flush=True)
        for line in sys.stdin:
            if line.strip() == "kill":
                nodes.remove_node(added.pop(), allow_graceful=False)
            elif line.strip() == "kill head":
                nodes.head_node.kill_gcs_server()
            else:
                added.append(nodes.add_node(**options))
                nodes.wait_for_nodes(END_SECONDS)  # a killed node counts for some seconds
            print("answer done", flush=True)
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
