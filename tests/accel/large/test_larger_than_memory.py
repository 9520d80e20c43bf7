"""A model of three times the address space that a process may take computes as block by block."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.benchmarks import bench_large

BLOCKS = 12


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are those of Linux")
def test_a_model_of_three_times_the_memory(tmp_path: Path) -> None:
    bench_large.write(tmp_path, BLOCKS, per_shard=1)
    arguments = argparse.Namespace(blocks=BLOCKS, threads=1, warm=True)
    hand, ours = (
        bench_large.measured(f"forward-{name}", tmp_path, arguments) for name in ("hand", "accel")
    )
    assert isinstance(hand, dict), hand
    assert isinstance(ours, dict), ours
    assert ours["value"] == hand["value"]
    # A block in memory, two of which one is read ahead, and what the hooks are made of.
    assert ours["peak"] < BLOCKS * bench_large.BLOCK_BYTES / bench_large.SHARE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are those of Linux")
def test_of_a_sharded_checkpoint_one_shard_is_in_memory_beside_the_model(tmp_path: Path) -> None:
    bench_large.write(tmp_path, BLOCKS, per_shard=3)
    arguments = argparse.Namespace(blocks=BLOCKS, threads=1, warm=True)
    found = bench_large.measured("load-accel", tmp_path, arguments)
    assert isinstance(found, dict), found
    beside = found["peak"] - BLOCKS * bench_large.BLOCK_BYTES
    assert beside < bench_large.MEMORY_BUDGET * 3 * bench_large.BLOCK_BYTES
