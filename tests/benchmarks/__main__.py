"""Run every benchmark: ``python -m tests.benchmarks``."""

from __future__ import annotations

from tests.benchmarks import bench_import, bench_step, bench_sweep

bench_step.main()
bench_import.main()
bench_sweep.main()
