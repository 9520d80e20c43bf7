"""Run every benchmark: ``python -m tests.benchmarks``; models larger than memory in small."""

from __future__ import annotations

from tests.benchmarks import bench_import, bench_large, bench_step, bench_sweep

bench_step.main()
bench_import.main()
bench_sweep.main()
bench_large.main(["--blocks", "16", "--per-shard", "2", "--turns", "5", "--warm"])
