"""What tests of several rooms of the runner share."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.recipe import hydra_setup
from runner.recipe.factory import register
from tests import ray_nodes, slurm


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget what a test registers."""
    before = {k: dict(getattr(register, k)._factories) for k in ("model", "step", "callback")}
    yield
    for kind, factories in before.items():
        getattr(register, kind)._factories.clear()
        getattr(register, kind)._factories.update(factories)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in an empty folder; leave the module search path and the log (`--info`) alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))


@pytest.fixture(scope="module")
def hydra_session() -> Iterator[None]:
    """Compose with one search path."""
    with hydra_setup.session():
        yield


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[slurm.Cluster]:
    """Run a Slurm of two nodes."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # sockets want a short path
        with slurm.running(Path(folder)) as found:
            yield found


@pytest.fixture(scope="session")
def nodes() -> Iterator[ray_nodes.Cluster]:
    """Two nodes of a Ray cluster on this machine, of two CPUs each; nothing of them stays."""
    with ray_nodes.cluster() as found:
        yield found
        assert len(ray_nodes.processes(found.address)) >= 3
    assert ray_nodes.processes(found.address) == []
