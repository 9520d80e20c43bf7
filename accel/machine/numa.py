"""CPUs of one NUMA node for each process, near its GPU (Linux).

Source: https://docs.kernel.org/admin-guide/mm/numaperf.html;
    https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci (numa_node)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from accel.machine import env
from accel.machine.errors import ConfigError

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
# Processes (one, as a rule) that `set_numa_affinity` has bound.
_BOUND: set[int] = set()


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPUs of one NUMA node: its GPU's, else one by index.

    CPUs that the process may not use are left out; a node that has no other leaves the binding as
    it is. A machine of one node has nothing to bind.

    Args:
        local_process_index: index of this process on its node, from 0.
        verbose: whether the CPUs are printed; None: ACCELERATE_DEBUG_MODE.

    Raises:
        ConfigError: if the operating system binds no processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        rule = "the operating system binds no process to CPUs"
        raise ConfigError.of(f"CPU affinity on {sys.platform}", rule, "Unset it.")
    verbose = env.flag("ACCELERATE_DEBUG_MODE") if verbose is None else verbose
    nodes = _nodes()
    if len(nodes) < 2:
        return
    node = _node_of_gpu(local_process_index)
    if node not in nodes:
        node = sorted(nodes)[local_process_index % len(nodes)]
    cpus = nodes[node] & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    if verbose:
        found = (
            f"CPUs {_shown(cpus)} of NUMA node {node}" if cpus else f"no CPU of NUMA node {node}"
        )
        print(f"Process {local_process_index} runs on {found}")


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPUs of one NUMA node, once; see `override_numa_affinity`.

    Args:
        local_process_index: index of this process on its node, from 0.
        verbose: whether the CPUs are printed; None: ACCELERATE_DEBUG_MODE.
    """
    if local_process_index not in _BOUND:
        override_numa_affinity(local_process_index, verbose)
        _BOUND.add(local_process_index)


def _nodes() -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node that has some."""
    found = {
        int(path.parent.name.removeprefix("node")): _parsed(path.read_text())
        for path in NODES.glob("node[0-9]*/cpulist")
    }
    return {node: cpus for node, cpus in found.items() if cpus}


def _parsed(text: str) -> set[int]:
    """Return the CPUs that the kernel writes as ``"0-3,8"``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _shown(cpus: set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


def _node_of_gpu(index: int) -> int | None:
    """Return the NUMA node of a CUDA device; None: there is no such device, or it has none."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    device: Any = torch.cuda.get_device_properties(index)
    place = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    path = PCI_DEVICES / place / "numa_node"
    return int(path.read_text()) if path.is_file() else None
