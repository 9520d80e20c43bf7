"""R9: workers of one run on two nodes of a real Ray cluster; what is said without one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel.machine.errors import ConfigError, MissingPackageError
from runner.launch import ray
from runner.launch.remote_process import Site
from runner.recipe import trust
from tests import ray_nodes
from tests.helpers import free_port
from tests.ray_nodes import Cluster
from tests.signals.cells import RECIPE

TWO = (
    *("distributed=ray", "distributed.num_processes=2", "distributed.ray.placement=STRICT_SPREAD"),
    *("tracker.log_with=[]", "data.augment=false", "model.width=4"),
)
SHORT = ("trainer.max_steps=6", "trainer.log_every=1")
LONG = ("trainer.epochs=100000", "checkpoint.every_steps=20")


def losses(cwd: Path, name: str) -> list[Any]:
    (path,) = cwd.glob(f"runs/{name}/*/metrics.jsonl")
    return [json.loads(line).get("loss") for line in path.read_text().splitlines()]


def pids(cwd: Path) -> list[int]:
    """Return the ids of the workers: rank 0's is in the log of the run, the others' in theirs."""
    found = []
    for path, mark in (("run.log", r"process (\d+),.*of rank 0"), ("logs/rank_1.log", r"s (\d+),")):
        for log in cwd.glob(f"runs/*/*/{path}"):
            found += [int(pid) for pid in re.findall(mark, log.read_text())[-1:]]
    return found


def signalled(number: signal.Signals, processes: list[int]) -> None:
    for process in processes:
        os.kill(process, number)


def training(nodes: Cluster, cwd: Path, *more: str) -> subprocess.Popen[str]:
    """Start a long run; return when it has written a checkpoint."""
    command = nodes.start(*TWO, *LONG, *more, cwd=cwd)
    written = "runs/*/*/checkpoints/checkpoint_*"
    ray_nodes.wait_until(lambda: any(cwd.glob(written)) and len(pids(cwd)) == 2, command)
    return command


@ray_nodes.in_a_cluster
def test_two_nodes_train_what_two_processes_here_train(nodes: Cluster, tmp_path: Path) -> None:
    here = ("distributed=multi_cpu", "distributed.num_processes=2", *TWO[3:])
    code, output = nodes.run(*here, *SHORT, "name=here", cwd=tmp_path)
    assert code == 0, output
    code, output = nodes.run(*TWO, *SHORT, "name=there", cwd=tmp_path)
    assert code == 0, output
    assert "2 processes" in output
    assert output.count("validation  step 6") == 1
    assert losses(tmp_path, "there") == losses(tmp_path, "here")
    (log,) = tmp_path.glob("runs/there/*/run.log")
    assert log.read_text().count("validation  step 6") == 1


@ray_nodes.in_a_cluster
@pytest.mark.parametrize("strategy", ["fsdp=full_shard", "deepspeed=zero2"])
def test_a_strategy_composes(
    nodes: Cluster, tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # deepspeed sets it for good
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    code, output = nodes.run(*TWO, *SHORT, strategy, cwd=tmp_path)
    assert code == 0, output
    assert strategy.partition("=")[0] in output


@ray_nodes.in_a_cluster
def test_a_stop_signal_saves_and_the_run_goes_on(nodes: Cluster, tmp_path: Path) -> None:
    command = training(nodes, tmp_path)
    workers = pids(tmp_path)
    command.send_signal(signal.SIGTERM)
    code, output = ray_nodes.ended(command)
    assert code == 75, output
    ray_nodes.wait_for_end_of(workers)
    (summary,) = tmp_path.glob("runs/*/*/summary.json")
    step = json.loads(summary.read_text())["step"]
    resume = (f"resume={summary.parent}", f"trainer.stop_after={step + 3}")
    code, output = nodes.run(*resume, cwd=tmp_path)
    assert code == 0, output
    assert json.loads(summary.read_text())["step"] == step + 3


@ray_nodes.in_a_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_command_ends_the_workers(
    nodes: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    command = training(nodes, tmp_path)
    workers = pids(tmp_path)
    command.send_signal(number)
    code, output = ray_nodes.ended(command)
    assert code == (130 if number == signal.SIGINT else -number), output
    ray_nodes.wait_for_end_of(workers)


@ray_nodes.in_a_cluster
def test_a_killed_worker_is_named(nodes: Cluster, tmp_path: Path) -> None:
    command = training(nodes, tmp_path)
    workers = pids(tmp_path)
    os.kill(workers[1], signal.SIGKILL)
    code, output = ray_nodes.ended(command)
    assert code == 1, output
    assert "rank 1 failed first: its process was ended by SIGKILL" in output
    ray_nodes.wait_for_end_of(workers)


@ray_nodes.in_a_cluster
def test_an_error_is_reported_with_its_rank(nodes: Cluster, tmp_path: Path) -> None:
    code, output = nodes.run(*TWO, *SHORT, "optimizer.lr=1e30", cwd=tmp_path)
    assert code == 1, output
    assert re.search(r"rank [01] failed first: .*(nan|inf|finite)", output), output


@ray_nodes.in_a_cluster
def test_a_killed_node_is_named(nodes: Cluster, tmp_path: Path) -> None:
    command = training(nodes, tmp_path)
    workers = pids(tmp_path)
    nodes.kill_node()
    try:
        code, output = ray_nodes.ended(command)
        assert code == 1, output
        assert re.search(r"rank [01] failed first: Ray has lost it: .*", output), output
        ray_nodes.wait_for_end_of(workers)
    finally:
        nodes.add_node()


@ray_nodes.in_a_cluster
def test_a_run_whose_end_the_head_does_not_see_is_complete(tmp_path: Path) -> None:
    waits = ("objective.wait=evaluation", "objective.folder=.", "trainer.epochs=1")
    with ray_nodes.cluster() as nodes:
        command = nodes.start(*RECIPE, *TWO[:3], *waits, cwd=tmp_path)
        places = [tmp_path / f"evaluation_{rank}" for rank in (0, 1)]
        ray_nodes.wait_until(lambda: all(place.exists() for place in places), command)
        nodes.kill_head()
        (tmp_path / "go").touch()
        code, output = ray_nodes.ended(command)
    assert code == 0, output
    assert "trainer.epochs=1 completed" in output


@ray_nodes.in_a_cluster
def test_workers_whose_interpreters_native_code_keeps_end_the_run(
    nodes: Cluster, tmp_path: Path
) -> None:
    keeps = ("objective.ending=hang_native", "objective.on=null", "trainer.hang_timeout=2")
    code, output = nodes.run(*RECIPE, *TWO[:3], *keeps, cwd=tmp_path)
    assert code == 1, output
    assert "it hangs: native code keeps the interpreter" in output
    ray_nodes.wait_for_end_of(pids(tmp_path))


@ray_nodes.in_a_cluster
def test_a_run_that_waits_for_room_can_be_ended(nodes: Cluster, tmp_path: Path) -> None:
    command = nodes.start(*TWO, "distributed.num_processes=16", *SHORT, cwd=tmp_path)
    assert command.stdout is not None
    lines = []
    for line in command.stdout:
        lines.append(line)
        if line.startswith("Waiting for room"):
            break
    command.send_signal(signal.SIGTERM)
    code, output = ray_nodes.ended(command)
    assert "16 processes (CPU 1 each, STRICT_SPREAD)" in lines[-1], lines
    assert code == 143, output
    assert "SIGTERM came before training began: nothing is saved." in output


# -- without a cluster -----------------------------------------------------------------------------


def test_local_ranks_choose_among_the_gpus_of_their_node() -> None:
    places = [("a", "3"), ("a", "0"), ("b", "1")]
    sites: list[Site] = [
        {"node": node, "address": "", "host": "", "gpus": [gpu], "missing": []}
        for node, gpu in places
    ]
    found = [
        place.of_rank(rank, "0001")
        for place in ray.places_of(sites, "here", 1, {})
        for rank in place.ranks
    ]
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["3,0", "3,0", "1"]


class Resources:
    """A cluster's resources, without a cluster."""

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 4.0, "memory": 1e9}

    @staticmethod
    def get_runtime_context() -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")


def test_packages_trusted_here_are_trusted_in_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.VARIABLE, "mypkg")
    found = ray.environment(Resources)  # type: ignore[arg-type]
    assert found[trust.VARIABLE] == "mypkg"
    assert found[ray.ADDRESS] == "10.0.0.1:6379"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match="accel-runner"):
        with ray.connected(None, "distributed.ray.address"):
            pass


def test_no_cluster_is_a_refusal_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, note = "distributed.ray.address", tmp_path / "current"
    monkeypatch.setattr(ray, "CURRENT", note)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="none runs on this machine") as raised:
        ray.require_cluster(None, key)
    assert "`ray start --head`" in str(raised.value)
    address = f"127.0.0.1:{free_port()}"
    note.write_text(address)
    for given in (None, address):
        with pytest.raises(ConfigError, match=f"{address}: Connection refused"):
            ray.require_cluster(given, key)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        ray.require_cluster(None, key)
    ray.require_cluster("local", key)
