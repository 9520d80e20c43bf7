"""The cost of one step over a hand-written loop: Linear(8, 1), batch 8, one thread.

Both loops do the same: loader, accumulate, forward, backward, optimizer, scheduler, zero_grad. They
take turns every few milliseconds, so that what else the machine does, and how fast it happens to
be, hits both alike; of the steps of a turn the median counts. With the extra `compare` installed,
Accelerate and Lightning Fabric run beside.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.machine.imports import is_available

STEPS = 400  # of an epoch
TURN = 20  # steps that a loop makes before the other's turn
BATCH = 8
BUDGET = 1.08  # of the hand-written step: 10 µs where it takes 125
BACKWARD = torch.Tensor.backward

# Starts one epoch, which halts after each step.
Epoch = Callable[[], Iterator[None]]
Parts = tuple[torch.nn.Module, torch.optim.Optimizer, Iterable[Any], Any]


def parts() -> Parts:
    """Return a model, its optimizer, a loader of `STEPS` batches and a scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(STEPS * BATCH, 8), torch.randn(STEPS * BATCH, 1))
    return model, optimizer, DataLoader(data, batch_size=BATCH), scheduler


def plain_epoch(
    objects: Parts, backward: Callable[[torch.Tensor], Any], device: str = "cpu"
) -> Epoch:
    """Return an epoch without accumulation; batches are moved to `device` unless they are there."""
    model, optimizer, loader, scheduler = objects

    def epoch() -> Iterator[None]:
        for inputs, targets in loader:
            if device != "cpu":
                inputs, targets = inputs.to(device), targets.to(device)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield

    return epoch


def accumulating_epoch(accelerator: Any) -> Epoch:
    """Return an epoch of the documented loop on an `Accelerator`, ours or the other."""
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())

    def epoch() -> Iterator[None]:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield

    return epoch


def by_hand(device: str) -> Epoch:
    """Return the loop that everything is compared with."""
    model, optimizer, loader, scheduler = parts()
    return plain_epoch((model.to(device), optimizer, loader, scheduler), BACKWARD, device)


def on_accelerate(device: str) -> Epoch:
    """Return the documented loop on Accelerate."""
    from accelerate import Accelerator as Other

    return accumulating_epoch(Other(cpu=device == "cpu"))


def on_fabric(device: str) -> Epoch:
    """Return the loop on Lightning Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1)
    model, optimizer, loader, scheduler = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    return plain_epoch((model, optimizer, loader, scheduler), fabric.backward)


def contestants(device: str) -> dict[str, Epoch]:
    """Return the loops to compare with the hand-written one, by name."""
    found = {"accel": accumulating_epoch(Accelerator(cpu=device == "cpu"))}
    if is_available("accelerate"):
        found["accelerate"] = on_accelerate(device)
    if is_available("lightning_fabric"):
        found["fabric"] = on_fabric(device)
    return found


def turn(steps: Iterator[None]) -> float:
    """Return the median time of a step of the next turn, µs."""
    times = [time.perf_counter_ns()]
    for _ in itertools.islice(steps, TURN):
        times.append(time.perf_counter_ns())
    return statistics.median(b - a for a, b in itertools.pairwise(times)) / 1e3


def taking_turns(first: Epoch, second: Epoch) -> list[tuple[float, float]]:
    """Return the median steps of each pair of turns of one epoch of both, µs."""
    gc.collect()
    one, other = first(), second()
    pairs = []
    for index in range(STEPS // TURN):
        # Who goes first changes, so that a slow start of a pair hits both equally often.
        if index % 2:
            late, early = turn(other), turn(one)
        else:
            early, late = turn(one), turn(other)
        pairs.append((early, late))
    return pairs


def measure(epochs: int, device: str) -> dict[str, tuple[float, float, float]]:
    """Compare every contestant with the hand-written loop in interleaved pairs of turns.

    Returns:
        By name: the median of the ratios, the median of the differences, µs, and the median step of
        the hand-written loop, µs.
    """
    hand, others = by_hand(device), contestants(device)
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    for index in range(epochs + 1):
        for name, epoch in others.items():
            pairs = taking_turns(hand, epoch)
            results[name] += pairs if index else []  # the first warms up
    return {
        name: (
            statistics.median(mine / base for base, mine in found),
            statistics.median(mine - base for base, mine in found),
            statistics.median(base for base, _ in found),
        )
        for name, found in results.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help=f"of {STEPS // TURN} pairs each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all loops")
    options = parser.parse_args(arguments)
    epochs, device = options.epochs, options.device
    torch.set_num_threads(1)
    pairs = epochs * STEPS // TURN
    where = f"{device}, median of {pairs} pairs of {TURN}"
    table = Table(title=f"A step over the hand-written one ({where})")
    for heading in ("loop", "hand-written µs", "ratio", "extra µs"):
        table.add_column(heading, justify="left" if heading == "loop" else "right")
    found = measure(epochs, device)
    for name, (ratio, extra, base) in found.items():
        table.add_row(name, f"{base:.1f}", f"{ratio:.3f}", f"{extra:+.2f}")
    console = Console()
    console.print(table)
    ratio = found["accel"][0]
    verdict = "within" if ratio <= BUDGET else "above"
    console.print(f"accel costs {ratio:.3f} times as much, {verdict} the budget of {BUDGET}.")


if __name__ == "__main__":
    main()
