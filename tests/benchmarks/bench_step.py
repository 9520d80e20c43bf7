"""The cost of one step over a hand-written loop: Linear(8, 1), batch 8, one thread.

Run it with ``python -m tests.benchmarks.bench_step``. Both loops do the same: loader, forward,
backward, optimizer, scheduler, zero_grad. They take turns, and their CPU time is compared, so that
other load on the machine hits both alike and little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator

STEPS = 400
BATCH = 8
BUDGET_US = 10.0


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader, object]:
    """Return a model, its optimizer, a loader of `STEPS` batches and a scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(STEPS * BATCH, 8), torch.randn(STEPS * BATCH, 1))
    return model, optimizer, DataLoader(data, batch_size=BATCH), scheduler


def by_hand() -> Callable[[], None]:
    """Return one epoch of the hand-written loop."""
    model, optimizer, loader, scheduler = make()

    def epoch() -> None:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return epoch


def with_accel() -> Callable[[], None]:
    """Return one epoch of the same loop on an `Accelerator`."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*make())

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return epoch


def seconds(epoch: Callable[[], None]) -> float:
    """Return the CPU time of one step, seconds."""
    gc.collect()
    start = time.process_time()
    epoch()
    return (time.process_time() - start) / STEPS


def measure(pairs: int) -> tuple[float, float]:
    """Return the median ratio and the median difference (µs a step) over interleaved pairs."""
    hand, ours = by_hand(), with_accel()
    for epoch in (hand, ours):
        epoch()
    ratios, extras = [], []
    for index in range(pairs):
        # Who goes first changes, so that a slow start of a pair hits both equally often.
        if index % 2:
            mine, base = seconds(ours), seconds(hand)
        else:
            base, mine = seconds(hand), seconds(ours)
        ratios.append(mine / base)
        extras.append((mine - base) * 1e6)
    return statistics.median(ratios), statistics.median(extras)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs (at least 20)")
    pairs = max(20, parser.parse_args().pairs)
    torch.set_num_threads(1)
    ratio, extra = measure(pairs)
    verdict = "within" if extra <= BUDGET_US else "above"
    print(
        f"a step costs {ratio:.3f} times the hand-written one: {extra:+.2f} µs "
        f"({verdict} the budget of {BUDGET_US:.0f} µs; median of {pairs} interleaved pairs)"
    )


if __name__ == "__main__":
    main()
