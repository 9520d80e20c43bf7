"""Functions on several processes: forks of a notebook, or of this process (E1)."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel import Accelerator, PartialState, debug_launcher, launchers, notebook_launcher
from accel.machine import env as environment
from accel.machine.errors import ConfigError, StateError
from accel.utils import DistributedType, PrepareForLaunch, is_port_in_use
from tests.helpers import ROOT, free_port


def report(folder: str, *words: str) -> None:
    """Leave what this process finds: its place, its precision, the sum over all."""
    accelerator = Accelerator(cpu=True)
    found = {
        "words": words,
        "size": accelerator.num_processes,
        "local": accelerator.local_process_index,
        "precision": accelerator.mixed_precision,
        "sum": accelerator.gather(torch.ones(1)).sum().item(),
        "threads": torch.get_num_threads(),
        "cpu": environment.flag("ACCELERATE_USE_CPU"),
        "port": environment.read("MASTER_PORT"),
        "attempt": environment.read("TORCHELASTIC_RESTART_COUNT"),
        "run": environment.read("TORCHELASTIC_RUN_ID"),
        "pid": os.getpid(),
    }
    place = Path(folder) / f"{accelerator.process_index}.json"
    place.write_text(json.dumps(found))
    accelerator.end_training()


def reported(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_a_function_runs_on_processes_of_the_cpu(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    debug_launcher(report, (str(tmp_path), "a", "b"))
    found = reported(tmp_path)
    assert [one["local"] for one in found] == [0, 1]
    assert all(one["words"] == ["a", "b"] and one["sum"] == one["size"] == 2 for one in found)
    assert all(one["cpu"] and one["threads"] == 1 for one in found)
    assert os.getpid() not in [one["pid"] for one in found]
    assert signal.getsignal(signal.SIGINT) is handler
    assert not PartialState._shared_state


def test_the_number_of_processes_to_debug_with(tmp_path: Path) -> None:
    debug_launcher(report, (str(tmp_path),), num_processes=3)
    assert [one["size"] for one in reported(tmp_path)] == [3, 3, 3]
    with pytest.raises(ConfigError, match="num_processes=0"):
        debug_launcher(report, num_processes=0)


def test_a_notebook_trains_on_several_processes(tmp_path: Path) -> None:
    port = free_port()
    arguments = (str(tmp_path), "x")
    notebook_launcher(report, arguments, 2, "bf16", str(port), rdzv_id="job", monitor_interval=0.05)
    found = reported(tmp_path)
    assert [(one["size"], one["precision"], one["run"]) for one in found] == [
        (2, "bf16", "job")
    ] * 2
    assert [one["words"] for one in found] == [["x"], ["x"]]
    assert environment.read("ACCELERATE_MIXED_PRECISION") is None


def test_one_process_is_the_notebook_itself(tmp_path: Path) -> None:
    notebook_launcher(report, (str(tmp_path),), np.int64(1), mixed_precision="bf16")
    (found,) = reported(tmp_path)
    assert found["pid"] == os.getpid()
    assert (found["size"], found["precision"]) == (1, "bf16")


def fail(folder: str) -> None:
    if environment.read("RANK") == "1":
        raise ValueError("no such thing")
    report(folder)


@pytest.mark.timeout(25)  # the agent kills a process that does not end within 30 s
def test_a_failure_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*in fail(.|\n)*no such thing"):
        notebook_launcher(fail, (str(tmp_path),), num_processes=2, use_port=0)


def fail_once(folder: str) -> None:
    """Fail in the first attempt of the worker group."""
    if environment.read("TORCHELASTIC_RESTART_COUNT") == "0":
        raise ValueError("the first attempt")
    report(folder)


@pytest.mark.slow
def test_a_failed_group_starts_anew(tmp_path: Path) -> None:
    notebook_launcher(fail_once, (str(tmp_path),), 2, use_port=0, max_restarts=1)
    assert [one["attempt"] for one in reported(tmp_path)] == ["1", "1"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"mixed_precision": "bf61"}, "mixed_precision='bf61'"),
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": 1.5}, "num_processes=1.5: it is a whole number"),
        ({"node_rank": "0"}, "node_rank='0': it is a whole number, at least 0"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"node_rank": 2, "num_nodes": 2}, "node_rank=2: it is from 0 to 1"),
        ({"max_restarts": -1}, "max_restarts=-1: it is a whole number, at least 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        notebook_launcher(report, **arguments)


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"use_port={port}: processes cannot meet there"):
            notebook_launcher(report, num_processes=2, use_port=port)


def test_nodes_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of several nodes arrive in the agent's configuration."""
    started: list[Any] = []
    monkeypatch.setattr(launchers, "_fork", lambda *given: started.append(given))
    notebook_launcher(
        report,
        num_processes=4,
        master_addr="10.0.0.1",
        use_port=4242,
        node_rank=1,
        num_nodes=2,
        rdzv_conf={"timeout": 33},
        rdzv_id="job",
        monitor_interval=0.5,
        log_line_prefix_template="[${rank}] ",
    )
    configuration = started[-1][-1]
    assert (configuration.min_nodes, configuration.max_nodes) == (2, 2)
    assert configuration.nproc_per_node == 4
    assert configuration.rdzv_endpoint == "10.0.0.1:4242"
    assert configuration.rdzv_configs == {"rank": 1, "timeout": 33}
    assert (configuration.run_id, configuration.monitor_interval) == ("job", 0.5)
    assert configuration.log_line_prefix_template == "[${rank}] "
    assert configuration.rdzv_backend == "static"
    notebook_launcher(report, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="node0:1")
    configuration = started[-1][-1]
    assert (configuration.rdzv_backend, configuration.rdzv_endpoint) == ("c10d", "node0:1")


def test_a_precision_that_the_notebooks_accelerator_lacks_is_refused() -> None:
    Accelerator(cpu=True)
    with pytest.raises(StateError, match=r"mixed_precision='bf16'.*of precision 'no'"):
        notebook_launcher(print, num_processes=1, mixed_precision="bf16")
    notebook_launcher(print, num_processes=1)


def test_an_accelerator_of_the_notebook_is_refused() -> None:
    Accelerator(cpu=True)
    with pytest.raises(StateError, match="This process has an Accelerator"):
        debug_launcher(report)


NOTEBOOK = [
    "from accel import notebook_launcher",
    """
def train(name):
    import torch
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    total = accelerator.gather(torch.ones(1)).sum().item()
    print(f"{name} {accelerator.process_index} {total}\\n", end="", flush=True)
    accelerator.end_training()
""",
    "notebook_launcher(train, ('first',), num_processes=2, use_port=0)",
    "notebook_launcher(train, ('second',), num_processes=2, use_port=0)",
    "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)",
]


@pytest.mark.slow
def test_cells_of_a_jupyter_kernel_train_on_several_processes(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, NOTEBOOK)))
    path = os.pathsep.join([str(ROOT), environment.read("PYTHONPATH") or ""])
    with environment.patched(PYTHONPATH=path, JUPYTER_RUNTIME_DIR=str(tmp_path)):
        client(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    printed = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert sorted(printed[2].split("\n")) == ["", "first 0 2.0", "first 1 2.0"]
    assert sorted(printed[3].split("\n")) == ["", "second 0 2.0", "second 1 2.0"]
    assert printed[4] == "True\n"  # Ctrl-C interrupts a cell as before


def kill_rank_one() -> None:
    if Accelerator(cpu=True).process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)  # in a collective, its own error could come first


def test_the_signal_that_ended_a_process_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"The process of rank 1 was ended by SIGKILL\."):
        debug_launcher(kill_rank_one)


def test_a_port_is_in_use_while_a_program_listens() -> None:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]
        assert not is_port_in_use(port)
        listening.listen()
        assert is_port_in_use(port)
    assert not is_port_in_use(port)


@pytest.mark.parametrize(
    ("distributed_type", "expected"),
    [
        ("MULTI_CPU", {"RANK": "5", "LOCAL_RANK": "1"}),
        (DistributedType.MULTI_GPU, {"RANK": "5", "LOCAL_RANK": "1"}),
        ("NO", {}),
        ("FSDP", {}),
    ],
)
def test_a_process_learns_its_rank_from_its_index(
    distributed_type: DistributedType | str, expected: dict[str, str]
) -> None:
    names = ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")
    node = {"NODE_RANK": "2", "NPROC": "2"}
    calls: list[tuple[object, ...]] = []
    with environment.patched(**dict.fromkeys(names), **node):
        PrepareForLaunch(lambda *args: calls.append(args), distributed_type)(1, "a", "b")
        found = {name: environment.read(name) for name in names if environment.read(name)}
    assert calls == [("a", "b")]
    assert found == {"FORK_LAUNCHED": "1", **expected}


def test_debugging_has_a_launcher_of_its_own() -> None:
    with pytest.raises(ConfigError, match="Call debug_launcher"):
        PrepareForLaunch(print, debug=True)
