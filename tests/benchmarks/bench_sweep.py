"""Seconds per tiny job of a sweep against ``python train.py``, and the table of 10,000 jobs."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tests.helpers import python, ran
from tests.runner.sweep.large import make_large

BUDGET, LARGE_SECONDS = 0.5, 5.0
# A bare loop with what a tiny job does: one step, two evaluations, a checkpoint.
TRAIN = """
import sys, pathlib
import torch
from sklearn.datasets import load_digits
seed = int(sys.argv[1])
torch.manual_seed(seed)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = torch.nn.functional.cross_entropy(model(images[:64]), labels[:64])
loss.backward()
optimizer.step()
with torch.no_grad():
    for part in (slice(64, 192), slice(192, 320)):
        torch.nn.functional.cross_entropy(model(images[part]), labels[part]).item()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{seed}.pt")
"""


def bare(folder: Path, first: int, jobs: int) -> float:
    """Return the seconds of `jobs` starts of the bare script."""
    (folder / "train.py").write_text(TRAIN)
    began = time.perf_counter()
    for seed in range(first, first + jobs):
        subprocess.run(python("train.py", str(seed)), cwd=folder, check=True)
    return time.perf_counter() - began


def sweep(folder: Path, first: int, jobs: int, at_once: str) -> float:
    """Return the seconds of one sweep over as many tiny jobs, its start included."""
    seeds = ",".join(map(str, range(first, first + jobs)))
    line = ("-m", "runner", "-m", "debug=fdr", f"seed={seeds}", f"sweep.jobs={at_once}")
    began = time.perf_counter()
    ran(python(*line), folder).check_returncode()
    return time.perf_counter() - began


def large(folder: Path, jobs: int) -> dict[str, float]:
    """Return the seconds of the table, and of the same command again, of a large finished sweep."""
    line = make_large(folder, jobs)
    from runner.sweep import sweep, table

    (path,) = folder.glob("runs/*/sweep-*")
    found = sweep.read(path)
    measured: dict[str, Callable[[], object]] = {
        "read": lambda: sweep.read(path),
        "table": lambda: table.write_csv(found, table.results(found)),
        "the same command again": lambda: ran(
            python("-m", "runner", *line), folder
        ).check_returncode(),
    }
    result = {}
    for name, call in measured.items():
        began = time.perf_counter()
        call()
        result[name] = time.perf_counter() - began
    return result


def main() -> None:
    """Print the medians of interleaved rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=20, help="in each round")
    parser.add_argument("--large", type=int, default=10_000, help="jobs of the finished sweep")
    given, show = parser.parse_args(), Console(highlight=False).print
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        each: dict[str, list[float]] = {"bare": [], "1": [], "auto": []}
        for number in range(given.rounds):
            first = number * given.jobs
            each["bare"].append(bare(folder, first, given.jobs) / given.jobs)
            for at_once in ("auto", "1"):
                seconds = sweep(folder, first, given.jobs, at_once)
                each[at_once].append(seconds / given.jobs)
                for made in folder.glob("runs/debug/sweep-*"):
                    made.rename(folder / f"done-{made.name}-{at_once}")
        for at_once in ("auto", "1"):
            ratio = statistics.median(
                a / b for a, b in zip(each[at_once], each["bare"], strict=True)
            )
            show(
                f"sweep.jobs={at_once}: {statistics.median(each[at_once]):.2f} s a job against "
                f"{statistics.median(each['bare']):.2f} s of python train.py: {ratio:.2f} × "
                f"(budget {BUDGET} ×; {given.rounds} rounds of {given.jobs})"
            )
    with tempfile.TemporaryDirectory() as name:
        for what, seconds in large(Path(name), given.large).items():
            show(f"{given.large} jobs, {what}: {seconds:.2f} s (budget {LARGE_SECONDS} s)")


if __name__ == "__main__":
    main()
