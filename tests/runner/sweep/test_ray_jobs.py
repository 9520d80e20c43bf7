"""Jobs of a sweep on two nodes of a real Ray cluster (S1)."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.launch.fork_server import Order
from runner.launch.ray import Actor
from runner.recipe.plugins import RayConf
from runner.recipe.schema import Distributed, Recipe
from runner.runs import lock
from runner.runs.record import RunRecord
from runner.sweep.ray_jobs import Jobs
from tests import ray_nodes
from tests.ray_nodes import Cluster
from tests.runner.sweep.kills import killed_sweep
from tests.runner.sweep.test_kills import QUICK

# Two CPUs each: a job on each of the two nodes.
ONE_PER_NODE = ("-m", "hydra/launcher=ray", "hydra.launcher.num_cpus=2")


def run_dirs(cwd: Path) -> list[Path]:
    return sorted(cwd.glob("runs/*/sweep-*/0*"))


def most_at_once(cwd: Path) -> int:
    def read(name: str) -> list[Any]:
        return [
            json.loads(file.read_text())
            for run_dir in run_dirs(cwd)
            for file in run_dir.glob(f"sessions/*/{name}")
        ]

    starts = [(one["started"], 1) for one in read("environment.json")]
    changes = starts + [(one["time"], -1) for one in read("ended.json")]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def statuses(cwd: Path) -> list[str]:
    return [RunRecord(path).status for path in run_dirs(cwd)]


@ray_nodes.in_a_cluster
def test_jobs_run_on_both_nodes_and_a_failed_one_stops_no_other(
    nodes: Cluster, tmp_path: Path
) -> None:
    line = (*ONE_PER_NODE, "optimizer.lr=1e-3,1e30,1e-2,3e-3", "trainer.max_steps=40", *QUICK)
    code, output = nodes.run(*line, cwd=tmp_path)
    assert code == 1, output
    assert statuses(tmp_path) == ["finished", "failed", "finished", "finished"]
    assert most_at_once(tmp_path) == 2
    assert "1 of 4 jobs failed: 0001" in output
    (log,) = tmp_path.glob("runs/*/sweep-*/0001/logs/console.log")
    assert "finite" in log.read_text()


@ray_nodes.in_a_cluster
def test_a_killed_node_fails_its_job_alone_and_the_same_command_goes_on(
    nodes: Cluster, tmp_path: Path
) -> None:
    line = (*ONE_PER_NODE, "seed=0,1,2", "trainer.max_steps=200", *QUICK)
    command = nodes.start(*line, cwd=tmp_path)
    pattern = "runs/*/sweep-*/*/checkpoints/checkpoint_*"
    ray_nodes.wait_until(
        lambda: len({path.parts[-3] for path in tmp_path.glob(pattern)}) == 2, command
    )
    nodes.kill_node()
    try:
        code, output = ray_nodes.ended(command)
        assert code == 1, output
        assert "Ray has lost it" in output
        assert sorted(statuses(tmp_path)) == ["failed", "finished", "finished"]
        code, output = nodes.run(*line, cwd=tmp_path)
        assert code == 0, output
        assert statuses(tmp_path) == ["finished"] * 3
    finally:
        nodes.add_node()


@ray_nodes.in_a_cluster
def test_a_command_that_is_killed_leaves_no_job_and_goes_on(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    line = (*ONE_PER_NODE[1:], "seed=0,1,2", "trainer.max_steps=120", *QUICK)
    ended = killed_sweep(line, tmp_path, kills=1, longest=3.0)
    ended.require_complete(3)


@ray_nodes.in_a_cluster
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_ends_the_jobs(
    nodes: Cluster, tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    line = (*ONE_PER_NODE, "seed=0,1,2", "trainer.max_steps=1000000", *QUICK)
    command = nodes.start(*line, cwd=tmp_path)
    pattern = "runs/*/sweep-*/*/checkpoints/checkpoint_*"
    ray_nodes.wait_until(
        lambda: len({path.parts[-3] for path in tmp_path.glob(pattern)}) == 2, command
    )
    started = [holder.pid for path in run_dirs(tmp_path) if (holder := lock.holder(path))]
    command.send_signal(number)
    code, output = ray_nodes.ended(command)
    assert code == expected, output
    ray_nodes.wait_for_end_of(started)
    status = "stopped" if number == signal.SIGTERM else "interrupted"
    assert statuses(tmp_path) == [status] * 2  # the third never began


@ray_nodes.in_a_cluster
def test_optuna_searches_with_jobs_in_the_cluster(nodes: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = ("hydra/sweeper=optuna", "optimizer.lr=interval(1e-4,1e-2)")
    budget = ("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2", "trainer.max_steps=10")
    code, output = nodes.run(*ONE_PER_NODE, *search, *budget, *QUICK, cwd=tmp_path)
    assert code == 0, output
    assert statuses(tmp_path) == ["finished"] * 4
    assert output.count("trial ") >= 4


@ray_nodes.in_a_cluster
def test_jobs_of_several_processes_have_placement_groups(nodes: Cluster, tmp_path: Path) -> None:
    where = ("distributed=ray", "distributed.num_processes=2", "distributed.ray.placement=SPREAD")
    line = ("-m", "hydra/launcher=ray", "seed=0,1", *where, "trainer.max_steps=10", *QUICK)
    code, output = nodes.run(*line, cwd=tmp_path)
    assert code == 0, output
    assert statuses(tmp_path) == ["finished"] * 2
    assert len(list(tmp_path.glob("runs/*/sweep-*/*/logs/rank_1.log"))) == 2


# -- without a cluster ---------------------------------------------------------------------


class Ray:
    """Stands for a cluster of one node: what it has, and which actors were ended."""

    def __init__(self, **resources: float) -> None:
        self.resources, self.killed = resources, []
        self.kill = self.killed.append

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": self.resources}]

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [], references

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="here:1")


def made(ray: Any, **settings: Any) -> Jobs:
    return Jobs(ray, vars(RayConf(**settings)))


@pytest.mark.parametrize(
    ("distributed", "settings", "cpus", "gpus", "threads"),
    [
        ({}, {}, 1, 1, "1"),
        ({"device": "cpu"}, {}, 1, 0, "1"),
        ({"kind": "multi_cpu", "num_processes": 3, "num_threads": 2}, {}, 6, 0, "2"),
        ({"kind": "multi_cpu"}, {"num_cpus": 8, "num_gpus": 0.5}, 8, 0.5, "4"),
    ],
)
def test_a_job_gets_what_its_recipe_needs(
    distributed: dict[str, Any], settings: dict[str, Any], cpus: float, gpus: float, threads: str
) -> None:
    jobs = made(Ray(CPU=16, GPU=4), **settings)
    share = jobs.share_of(Recipe(distributed=Distributed(**distributed)))
    assert share is not None
    assert share.resources == {"CPU": cpus, "GPU": gpus}
    assert share.environment["OMP_NUM_THREADS"] == threads
    assert share.environment["RAY_ADDRESS"] == "here:1"


class Method:
    """Stands for a method of an actor that has no room yet."""

    def remote(self, *given: object) -> None:
        """Nobody answers."""


def test_a_stop_ends_a_job_that_waits_for_room() -> None:
    ray, actor = Ray(), SimpleNamespace(start=Method(), events=Method(), send=Method())
    order = Order(1, "", {"folder": "here"})
    job = Actor(ray, actor, order, on_lost=lambda reason: 1, waits=True)  # type: ignore[arg-type]
    assert job.poll() is None
    job.send(signal.SIGTERM)
    assert (job.poll(), ray.killed) == (-signal.SIGTERM, [actor])
