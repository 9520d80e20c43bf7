"""Commands on two nodes: on this machine's loopback, or in two network namespaces with a link.

Source: https://man7.org/linux/man-pages/man8/ip-netns.8.html
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import free_port, python
from tests.signals.cells import COMMAND, RECIPE, wait_until
from tests.signals.oracle import Command, kill, marked


@dataclass(frozen=True)
class Site:
    """Where the commands of two nodes run.

    Attributes:
        endpoint: the address of the first node.
        namespaces: of the two nodes; empty: both on this machine's loopback.
        cut: the command that cuts the link between them.
    """

    endpoint: str
    namespaces: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()

    def inside(self, node: int) -> list[str]:
        """Return the beginning of a command that runs on a node."""
        return ["ip", "netns", "exec", self.namespaces[node]] if self.namespaces else []


def loopback() -> Site:
    """Return two nodes on this machine's loopback."""
    return Site(f"127.0.0.1:{free_port()}")


def missing() -> str:
    """Return why no network namespaces can be made here, or ""."""
    if shutil.which("ip") is None:
        return "ip is not installed (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    probe = f"probe{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


@contextlib.contextmanager
def two_namespaces() -> Iterator[Site]:
    """Make two network namespaces that a pair of virtual interfaces joins."""
    word = secrets.token_hex(3)
    names = (f"node0-{word}", f"node1-{word}")
    ends = (f"va{word}", f"vb{word}")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"10.97.0.{number}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        cut = ("ip", "-n", names[1], "link", "set", ends[1], "down")
        yield Site(f"10.97.0.1:{free_port()}", names, cut)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


class Nodes:
    """The commands of nodes, which train the tiny run of `tests.signals.recipe`.

    Args:
        site: where they run.
        folder: an empty folder: their working directory.
    """

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder, self.mark = site, folder, secrets.token_hex(16)
        self.commands: list[Command] = []

    def start(self, node: int, *arguments: str) -> Command:
        """Start the command of a node."""
        line = [
            *self.site.inside(node),
            *python("-c", COMMAND, *RECIPE),
            "distributed=multi_node",
            f"distributed.node_rank={node}",
            f"distributed.rdzv_endpoint={self.site.endpoint}",
            *("distributed.num_processes=1", "distributed.device=cpu"),
            *("checkpoint.every_steps=1", "checkpoint.every_epochs=null"),
            *("trainer.epochs=null", "trainer.max_steps=6"),
            *arguments,
        ]
        command = Command(line, self.folder / f"output_{len(self.commands)}", self.mark)
        self.commands.append(command)
        return command

    def reached(self, *ranks: int, phase: str = "training") -> None:
        """Wait until ranks are in a phase; a command that ends meanwhile fails."""
        places = [self.folder / f"{phase}_{rank}" for rank in ranks]
        running = [command for command in self.commands if command.process.poll() is None]

        def is_over() -> bool:
            ended = any(command.process.poll() is not None for command in running)
            return ended or all(place.exists() for place in places)

        assert wait_until(is_over), self.outputs()
        assert all(place.exists() for place in places), self.outputs()

    @property
    def run_dir(self) -> Path:
        """The run directory: there is one."""
        (found,) = self.folder.glob("runs/*/*")
        return found

    def outputs(self) -> str:
        """Return what the commands have printed."""
        return "\n".join(f"-- {c.output.name}\n{c.printed()}" for c in self.commands)

    def left(self) -> list[int]:
        """Return the processes that are left, some seconds after the end of the commands."""
        wait_until(lambda: not marked(self.mark), 15.0)
        return marked(self.mark)

    def kill(self) -> None:
        """Kill what is left."""
        kill(self.mark)
        for command in self.commands:
            command.code(30.0)
