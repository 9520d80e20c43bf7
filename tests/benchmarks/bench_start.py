"""Start of two workers to the first step, against a bare script under torchrun.

    python -m tests.benchmarks.bench_start

Both train the same small CNN on digits with AdamW, on two processes of the CPU. Pairs are
interleaved, and the figure is the median of their ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.helpers import ROOT, python

BUDGET = 0.8
MARK = "step 1"  # begins the line that each prints after its first step
TRAIN = """
import os
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, padding=1),
    torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10),
)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
own = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
loss = torch.nn.functional.cross_entropy(model(images[own]), labels[own])
loss.backward()
optimizer.step()
if dist.get_rank() == 0:
    print("step 1", loss.item(), flush=True)
dist.destroy_process_group()
"""
BARE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
RUNNER = (
    *("-m", "runner", "debug=fdr", "distributed=multi_cpu", "distributed.num_processes=2"),
    "trainer.log_every=1",
)


def first_step(folder: Path, line: tuple[str, ...]) -> float:
    """Return the seconds from the start of a command to the end of its first step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with subprocess.Popen(
        python(*line),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        seconds = 0.0
        for text in process.stdout:
            if text.startswith(MARK) and not seconds:
                seconds = time.perf_counter() - began
    if not seconds:  # torchrun itself ends with 1 now and then, after the step
        raise RuntimeError(f"{' '.join(line)} ended with {process.returncode}")
    return seconds


def main() -> None:
    """Print the medians of interleaved pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    given, show = parser.parse_args(), Console(highlight=False).print
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        bare, runner = [], []
        for number in range(given.pairs):
            order = [(BARE, bare), (RUNNER, runner)]
            for line, seconds in order if number % 2 else order[::-1]:
                seconds.append(first_step(folder, line))
            show(f"pair {number + 1}: {bare[-1]:.2f} s under torchrun, {runner[-1]:.2f} s here")
    ratio = statistics.median(ours / theirs for ours, theirs in zip(runner, bare, strict=True))
    show(
        f"two workers to the first step: {statistics.median(runner):.2f} s against "
        f"{statistics.median(bare):.2f} s of a bare script under torchrun: {ratio:.2f} × "
        f"(budget {BUDGET} ×; {given.pairs} pairs)"
    )


if __name__ == "__main__":
    main()
