"""A model of three times the address space that a process may take computes as block by block."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.benchmarks import bench_large

BLOCKS = 12


def measured(folder: Path, kind: str) -> dict[str, dict[str, float]]:
    """Return what one turn of each contestant needed, by contestant."""
    arguments = argparse.Namespace(blocks=BLOCKS, threads=1, warm=True, turns=1, folder=str(folder))
    found = bench_large.in_child(f"{kind}-accel", arguments)
    assert isinstance(found, dict), found
    return {name: turns[0] for name, turns in found.items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are those of Linux")
def test_a_model_of_three_times_the_memory(tmp_path: Path) -> None:
    bench_large.write(tmp_path, BLOCKS, per_shard=1)
    found = measured(tmp_path, "forward")
    assert found["accel"]["value"] == found["hand"]["value"]
    # A block in memory, two of which one is read ahead, and what the hooks are made of.
    assert found["accel"]["peak"] < BLOCKS * bench_large.BLOCK_BYTES / bench_large.SHARE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are those of Linux")
def test_of_a_sharded_checkpoint_one_shard_is_in_memory_beside_the_model(tmp_path: Path) -> None:
    bench_large.write(tmp_path, BLOCKS, per_shard=3)
    # The model is in memory before: the peak is what comes beside it.
    peak = measured(tmp_path, "load")["accel"]["peak"]
    assert peak < bench_large.MEMORY_BUDGET * 3 * bench_large.BLOCK_BYTES
