"""Connecting to a Ray cluster, and the words for what it lacks."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from accel.errors import ConfigError, MissingPackageError
from runner.launch import ray_cluster
from tests import ray_nodes
from tests.helpers import free_port

LOST = """The actor died unexpectedly before finishing this task.
\tclass_name: ProcessHost
\tactor_id: 4ab
\tnamespace: 17
The actor died because its node has died. Node Id: 8f3
"""


class Resources:
    """A cluster's resources, without a cluster."""

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 4.0, "memory": 1e9}


def test_the_reason_is_the_line_that_says_why() -> None:
    assert ray_cluster.reason(Exception(LOST)) == (
        "The actor died because its node has died. Node Id: 8f3"
    )
    assert ray_cluster.reason(Exception("no room\n")) == "no room"
    assert ray_cluster.reason(ValueError()) == "ValueError"


def test_a_shortage_is_what_the_whole_cluster_lacks() -> None:
    short = ray_cluster.shortage(Resources, {"CPU": 4, "GPU": 2, "memory": 1})
    assert short == " The cluster has less than that: GPU 2 of 0."
    assert ray_cluster.shortage(Resources, {"CPU": 4}) == ""
    assert ray_cluster.num_gpus(Resources) == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.imports.is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match="accel-runner"):
        with ray_cluster.connected(None, "distributed.ray.address"):
            pass


@pytest.mark.skipif(bool(ray_nodes.missing()), reason=ray_nodes.missing())
def test_no_cluster_is_a_refusal_with_the_command() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="ray start --head") as raised:
        with ray_cluster.connected(address, "distributed.ray.address"):
            pass
    assert f"distributed.ray.address={address}" in str(raised.value)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.slow
@pytest.mark.skipif(bool(ray_nodes.missing()), reason=ray_nodes.missing())
def test_the_context_ends_the_connection(nodes: ray_nodes.Cluster) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with ray_cluster.connected(nodes.address, "distributed.ray.address") as found:
        ray: Any = found
        assert signal.getsignal(signal.SIGTERM) is handler
        assert ray_cluster.environment(ray)["RAY_ADDRESS"] == nodes.address
        assert ray.cluster_resources()["CPU"] == 4
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler
