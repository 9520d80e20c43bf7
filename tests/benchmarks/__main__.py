"""Run every benchmark: ``python -m tests.benchmarks``; models larger than memory in small."""

from __future__ import annotations

import torch

from tests.benchmarks import bench_import, bench_large, bench_step, bench_sweep

bench_step.main([])
if torch.cuda.is_available():
    bench_step.main(["--device", "cuda"])
bench_import.main()
bench_sweep.main()
bench_large.main(["--blocks", "16", "--per-shard", "2", "--turns", "5", "--warm"])
