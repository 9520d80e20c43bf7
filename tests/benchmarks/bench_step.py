"""The cost of one step over a hand-written loop: Linear(8, 1), batch 8, one thread.

Both loops do the same: loader, accumulate, forward, backward, optimizer, scheduler, zero_grad. They
take turns, epoch by epoch; of each epoch the median step counts, so that what else the machine does
hits both alike and little. With the extra `compare` installed, Accelerate and Lightning Fabric run
beside.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.imports import is_available

STEPS = 400
BATCH = 8
BUDGET_US = 10.0

# Runs one epoch and returns the time of each step, ns.
Epoch = Callable[[], list[int]]
Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Iterable[Any], Any]


def parts() -> Parts:
    """Return a model, its optimizer, a loader of `STEPS` batches and a scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(STEPS * BATCH, 8), torch.randn(STEPS * BATCH, 1))
    return model, optimizer, DataLoader(data, batch_size=BATCH), scheduler


def plain_epoch(objects: Parts, backward: Callable[[torch.Tensor], Any]) -> Epoch:
    """Return an epoch without accumulation."""
    model, optimizer, loader, scheduler = objects

    def epoch() -> list[int]:
        times = [time.perf_counter_ns()]
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            times.append(time.perf_counter_ns())
        return [after - before for before, after in itertools.pairwise(times)]

    return epoch


def accumulating_epoch(accelerator: Any) -> Epoch:
    """Return an epoch of the documented loop on an `Accelerator`, ours or the other."""
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())

    def epoch() -> list[int]:
        times = [time.perf_counter_ns()]
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            times.append(time.perf_counter_ns())
        return [after - before for before, after in itertools.pairwise(times)]

    return epoch


def by_hand() -> Epoch:
    """Return the loop that everything is compared with."""
    return plain_epoch(parts(), torch.Tensor.backward)


def on_accelerate() -> Epoch:
    """Return the documented loop on Accelerate."""
    from accelerate import Accelerator as Other

    return accumulating_epoch(Other(cpu=True))


def on_fabric() -> Epoch:
    """Return the loop on Lightning Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader, scheduler = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    return plain_epoch((model, optimizer, loader, scheduler), fabric.backward)


def contestants() -> dict[str, Epoch]:
    """Return the loops to compare with the hand-written one, by name."""
    found = {"accel": accumulating_epoch(Accelerator(cpu=True))}
    if is_available("accelerate"):
        found["accelerate"] = on_accelerate()
    if is_available("lightning_fabric"):
        found["fabric"] = on_fabric()
    return found


def median_step(epoch: Epoch) -> float:
    """Return the median time of a step of one epoch, µs."""
    gc.collect()
    return statistics.median(epoch()) / 1e3


def measure(pairs: int) -> dict[str, tuple[float, float, float]]:
    """Compare every contestant with the hand-written loop in interleaved pairs of epochs.

    Returns:
        By name: the median of the ratios, the median of the differences, µs, and the median step of
        the hand-written loop, µs.
    """
    hand, others = by_hand(), contestants()
    for epoch in (hand, *others.values()):
        epoch()
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    for index in range(pairs):
        for name, epoch in others.items():
            # Who goes first changes, so that a slow start of a pair hits both equally often.
            if index % 2:
                mine, base = median_step(epoch), median_step(hand)
            else:
                base, mine = median_step(hand), median_step(epoch)
            results[name].append((base, mine))
    return {
        name: (
            statistics.median(mine / base for base, mine in found),
            statistics.median(mine - base for base, mine in found),
            statistics.median(base for base, _ in found),
        )
        for name, found in results.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs (at least 20)")
    pairs = max(20, parser.parse_args().pairs)
    torch.set_num_threads(1)
    table = Table(title=f"A step over the hand-written one (median of {pairs} pairs)")
    for heading in ("loop", "hand-written µs", "ratio", "extra µs"):
        table.add_column(heading, justify="left" if heading == "loop" else "right")
    found = measure(pairs)
    for name, (ratio, extra, base) in found.items():
        table.add_row(name, f"{base:.1f}", f"{ratio:.3f}", f"{extra:+.2f}")
    console = Console()
    console.print(table)
    extra = found["accel"][1]
    verdict = "within" if extra <= BUDGET_US else "above"
    console.print(f"accel adds {extra:+.2f} µs, {verdict} the budget of {BUDGET_US:.0f} µs.")


if __name__ == "__main__":
    main()
