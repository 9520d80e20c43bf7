"""Connecting to a Ray cluster, and the words for what it lacks (R9)."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.machine.errors import ConfigError, MissingPackageError
from runner.launch import ray_cluster
from runner.recipe import trust
from tests.helpers import free_port


class Resources:
    """A cluster's resources, without a cluster."""

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 4.0, "memory": 1e9}

    @staticmethod
    def get_runtime_context() -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")


def test_a_shortage_is_what_the_whole_cluster_lacks() -> None:
    short = ray_cluster.shortage(Resources, {"CPU": 4, "GPU": 2, "memory": 1})
    assert short == " The cluster has less than that: GPU 2 of 0."
    assert ray_cluster.shortage(Resources, {"CPU": 4}) == ""
    assert ray_cluster.num_gpus(Resources) == 0


def test_packages_trusted_here_are_trusted_in_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.VARIABLE, "mypkg")
    found = ray_cluster.environment(Resources)  # type: ignore[arg-type]
    assert found[trust.VARIABLE] == "mypkg"
    assert found[ray_cluster.ADDRESS] == "10.0.0.1:6379"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.machine.imports.is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match="accel-runner"):
        with ray_cluster.connected(None, "distributed.ray.address"):
            pass


def test_no_cluster_is_a_refusal_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, note = "distributed.ray.address", tmp_path / "current"
    monkeypatch.setattr(ray_cluster, "CURRENT", note)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="none runs on this machine") as raised:
        ray_cluster.require_cluster(None, key)
    assert "`ray start --head`" in str(raised.value)
    address = f"127.0.0.1:{free_port()}"
    note.write_text(address)
    for given in (None, address):
        with pytest.raises(ConfigError, match=f"{address}: Connection refused"):
            ray_cluster.require_cluster(given, key)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        ray_cluster.require_cluster(None, key)
    ray_cluster.require_cluster("local", key)
