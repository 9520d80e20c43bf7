"""The command and the variables that start a script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.machine import env
from accel.machine.errors import ConfigError
from runner.launch import script
from runner.launch.script import Launch, Script, plan
from runner.recipe import processes

TRAIN = Script("train.py", ["--lr", "1"])


@pytest.fixture(autouse=True)
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(processes, "num_accelerators", lambda: 0)


def with_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(processes, "num_accelerators", lambda: number)


def torchrun(launch: Launch) -> list[str]:
    """Return the flags of torchrun, which ends with the script and its arguments."""
    assert launch.command[:3] == [sys.executable, "-m", "runner.launch.agent"]
    return launch.command[3:]


def test_one_process_is_started_as_it_is() -> None:
    assert plan({}, TRAIN).command == [sys.executable, "train.py", "--lr", "1"]
    module = Script("package.train", is_module=True)
    assert plan({}, module).command == [sys.executable, "-m", "package.train"]
    assert plan({}, Script("./train", no_python=True)).command == ["./train"]


def test_processes_on_the_cpu_meet_at_a_free_port() -> None:
    launch = plan({"use_cpu": True, "num_processes": 3}, TRAIN)
    flags = ["--nproc-per-node=3", "--max-restarts=0", "--standalone"]
    assert torchrun(launch) == [*flags, "train.py", "--lr", "1"]
    assert launch.variables["ACCELERATE_USE_CPU"] == "true"


def test_all_gpus_are_used_unless_some_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    assert "--nproc-per-node=4" in plan({}, TRAIN).command
    launch = plan({"gpu_ids": "1, 3"}, TRAIN)
    assert "--nproc-per-node=2" in launch.command
    assert launch.variables["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in plan({"gpu_ids": "all"}, TRAIN).variables
    assert plan({"use_cpu": True}, TRAIN).command == TRAIN.command


def test_machines_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    settings: dict[str, object] = {"num_machines": 2, "num_processes": 4, "machine_rank": 1}
    settings |= {"main_process_ip": "10.0.0.1", "rdzv_backend": "static"}
    flags = torchrun(plan(settings, TRAIN))
    assert flags[0] == "--nproc-per-node=2"
    assert flags[2:6] == [
        *("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500")
    ]
    flags = torchrun(plan({**settings, "rdzv_backend": "c10d", "main_process_port": 7}, TRAIN))
    assert "--rdzv-endpoint=10.0.0.1:7" in flags
    assert "--rdzv-conf=is_host=false" in flags
    flags = torchrun(plan({**settings, "rdzv_backend": "c10d", "rdzv_conf": "a=1"}, TRAIN))
    assert "--rdzv-conf=a=1" in flags


def test_flags_of_torchrun_are_handed_on() -> None:
    settings = {"max_restarts": "3", "monitor_interval": 0.5, "main_process_port": 4242}
    flags = torchrun(plan(settings, Script("x", no_python=True), ["--tee=3"]))
    expected = ["--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.5", "--nnodes=1"]
    expected += ["--node-rank=0", "--master-addr=127.0.0.1", "--master-port=4242", "--tee=3"]
    assert flags == [*expected, "--no-python", "x"]


def test_settings_reach_the_script_by_variables() -> None:
    settings: dict[str, Any] = {
        **{"mixed_precision": "bf16", "debug": True, "num_cpu_threads_per_process": 4},
        **{"gradient_accumulation_steps": 2, "enable_cpu_affinity": False, "zero_stage": 3},
        **{"dynamo_backend": "EAGER", "dynamo_use_fullgraph": True, "use_fsdp": True},
        **{"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": ["A", "B"]},
    }
    found = dict(plan(settings, TRAIN).variables)
    found.pop("PYTHONPATH", None)
    assert found == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DEBUG_MODE": "true",
        "OMP_NUM_THREADS": "4",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_CPU_AFFINITY": "false",
        "ACCELERATE_DYNAMO_BACKEND": "EAGER",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
    }
    found = dict(plan({"use_deepspeed": True, "zero_stage": 3}, TRAIN).variables)
    assert found["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert "ACCELERATE_USE_FSDP" not in found


def test_several_processes_take_one_thread_each_unless_told() -> None:
    settings = {"use_cpu": True, "num_processes": 2}
    with env.patched(OMP_NUM_THREADS=None):
        assert plan(settings, TRAIN).variables["OMP_NUM_THREADS"] == "1"
        assert "OMP_NUM_THREADS" not in plan({}, TRAIN).variables
    with env.patched(OMP_NUM_THREADS="5"):
        assert "OMP_NUM_THREADS" not in plan(settings, TRAIN).variables


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_processes": 2}, "num_processes=2: torch finds no GPU.*--cpu"),
        ({"num_processes": "two"}, "num_processes='two': expected an integer"),
        ({"num_processes": -1}, "num_processes=-1"),
        ({"num_machines": 2, "num_processes": 3, "use_cpu": True}, "Give 2, or a multiple"),
        ({"num_machines": 2, "num_processes": 2}, "Give --main_process_ip"),
        ({"machine_rank": 1}, "machine_rank=1: it is from 0 to 0"),
        ({"mixed_precision": "bf61"}, "mixed_precision='bf61'.*bf16"),
        ({"use_fsdp": True, "use_deepspeed": True}, "use_fsdp with use_deepspeed"),
        ({"use_fsdp": True, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "LOCAL_STATE_DICT"),
    ],
)
def test_what_contradicts_the_machine_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan(settings, TRAIN)


def test_a_launcher_that_starts_several_launches_is_refused() -> None:
    settings: dict[str, object] = {"use_cpu": True, "num_processes": 2}
    two = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    with env.patched(**two):
        with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2, num_machines=1: each of"):
            plan(settings, TRAIN)
        assert plan({}, TRAIN).command == TRAIN.command  # one of its processes
        machines = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "node0"}
        assert "--nnodes=2" in plan({**settings, **machines}, TRAIN).command


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"offers 2\. Give --num_processes=2"):
        plan({"num_processes": 3}, TRAIN)


def test_a_program_that_is_not_there_is_refused() -> None:
    launch = plan({}, Script("/nowhere/train", no_python=True))
    with env.patched(PYTHONPATH=os.environ.get("PYTHONPATH")):
        with pytest.raises(ConfigError, match="/nowhere/train"):
            launch.execute()


def test_a_checkout_is_imported_by_the_script() -> None:
    with env.patched(PYTHONPATH="/mine"):
        path = script.plan({}, TRAIN).variables.get("PYTHONPATH")
    assert path is None or path.split(os.pathsep)[0] == "/mine"


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SCRIPT 'trian.py': there is no such file"):
        plan({}, Script("trian.py"))
    (tmp_path / "package").mkdir()
    with pytest.raises(ConfigError, match=r"it is a folder without __main__\.py"):
        plan({}, Script("package"))
    (tmp_path / "package" / "__main__.py").touch()
    assert plan({}, Script("package")).command == [sys.executable, "package"]
