"""Stop a training on all processes as soon as one of them sees a reason to.

    python examples/scripts/early_stopping.py --patience 20
    accel launch --num_processes 2 --cpu examples/scripts/early_stopping.py

Each process watches the loss of its own batches, which no other one knows. The first whose loss
has not improved for `--patience` steps sets a trigger; at the same step all leave the loop.
"""

from __future__ import annotations

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed


class EarlyStopping:
    """Tells when a smoothed loss has stopped to improve.

    Args:
        patience: steps without improvement.
        min_delta: what counts as an improvement, a share of the best loss.
        smoothing: weight of the past in the running mean.
    """

    def __init__(self, patience: int, min_delta: float = 0.01, smoothing: float = 0.9) -> None:
        self.patience = patience
        self.min_delta = min_delta
        self.smoothing = smoothing
        self.mean: float | None = None
        self.best = float("inf")
        self.waited = 0

    def __call__(self, loss: float) -> bool:
        """Take over the loss of a step; return whether to stop."""
        past = loss if self.mean is None else self.mean
        self.mean = self.smoothing * past + (1 - self.smoothing) * loss
        self.waited += 1
        if self.mean < self.best * (1 - self.min_delta):
            self.best, self.waited = self.mean, 0
        return self.waited >= self.patience


def main() -> None:
    """Train until the loss of some process stops to improve, and evaluate."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(args.seed)
    digits = load_digits()
    order = torch.Generator().manual_seed(args.seed)
    drawn = torch.randperm(len(digits.target), generator=order)
    images = torch.from_numpy(digits.data).float()[drawn] / 16
    labels = torch.from_numpy(digits.target).long()[drawn]
    train_set = TensorDataset(images[360:], labels[360:])
    test_set = TensorDataset(images[:360], labels[:360])

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=args.lr),
        DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, generator=order),
        DataLoader(test_set, 128),
    )

    should_stop = EarlyStopping(args.patience)
    steps = 0
    stopped = False
    for _ in range(args.epochs):
        for inputs, targets in train_loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if should_stop(loss.item()):
                accelerator.set_trigger()
            if stopped := accelerator.check_trigger():  # whether any process has set it
                break
        if stopped:
            break

    model.eval()
    right = []
    for inputs, targets in test_loader:
        with torch.no_grad():
            found = model(inputs).argmax(dim=1)
        found, targets = accelerator.gather_for_metrics((found, targets))
        right.append(found == targets)
    accuracy = round(torch.cat(right).float().mean().item(), 4)
    accelerator.print(json.dumps({"accuracy": accuracy, "steps": steps, "stopped": stopped}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patience", type=int, default=20, help="steps")
    parser.add_argument("--epochs", type=int, default=50, help="at most")
    parser.add_argument("--batch_size", type=int, default=64, help="over all processes")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
