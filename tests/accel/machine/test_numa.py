"""CPUs of one NUMA node for each process; the machine's nodes are written down here (E1)."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest
import torch

from accel import PartialState
from accel.machine import env as environment
from accel.machine import numa
from accel.machine.errors import ConfigError


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """A machine of two nodes with four CPUs each, of which the process may use 0 to 5."""
    for node, cpus in {0: "0-1,4-5", 1: "2-3,6-7"}.items():
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    calls: list[set[int]] = []
    monkeypatch.setattr(numa, "NODES", tmp_path / "node")
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: calls.append(set(cpus)))
    monkeypatch.setattr(numa, "_BOUND", set())
    return calls


def test_processes_take_the_nodes_in_turn(
    bound: list[set[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        numa.override_numa_affinity(index)
    assert bound == [{0, 1, 4, 5}, {2, 3}, {0, 1, 4, 5}]
    assert capsys.readouterr().out == ""
    numa.override_numa_affinity(1, verbose=True)
    assert capsys.readouterr().out == "Process 1 runs on CPUs 2,3 of NUMA node 1\n"


def test_the_first_binding_stays_unless_it_is_overridden(
    bound: list[set[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    numa.set_numa_affinity(0, verbose=True)
    numa.set_numa_affinity(0, verbose=True)
    assert bound == [{0, 1, 4, 5}]
    assert capsys.readouterr().out == "Process 0 runs on CPUs 0,1,4,5 of NUMA node 0\n"
    numa.override_numa_affinity(1)
    assert bound[1:] == [{2, 3}]


def test_a_process_runs_near_its_gpu(
    bound: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: place)
    folder = tmp_path / "pci" / "0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    numa.override_numa_affinity(0)
    assert bound == [{2, 3}]
    (folder / "numa_node").write_text("-1\n")  # the kernel knows of none
    numa.override_numa_affinity(0)
    assert bound[1:] == [{0, 1, 4, 5}]


def test_the_variable_binds_each_process(bound: list[set[int]]) -> None:
    with environment.patched(ACCELERATE_CPU_AFFINITY="1"):
        PartialState(cpu=True)
    assert bound == [{0, 1, 4, 5}]


def test_a_system_without_binding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="CPU affinity on"):
        numa.override_numa_affinity(0)
