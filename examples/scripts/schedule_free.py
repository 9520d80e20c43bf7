"""Train without a learning-rate schedule: the optimizer averages the weights it is evaluated at.

    python examples/scripts/schedule_free.py
    accel launch --num_processes 2 --cpu examples/scripts/schedule_free.py

A schedule-free optimizer holds two sets of weights. `optimizer.train()` and `optimizer.eval()` go
beside those of the model; without them it trains at one set and evaluates the other's wrong one.

Source: https://arxiv.org/abs/2405.15682
"""

from __future__ import annotations

import argparse
import json

import torch
from schedulefree import AdamWScheduleFree
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed


def make_loaders(batch_size: int, seed: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders of training and test: images [B, 1, 8, 8] in [0, 1], labels [B]."""
    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits.target), generator=generator)
    images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 16
    labels = torch.from_numpy(digits.target).long()[order]
    train_set = TensorDataset(images[360:], labels[360:])
    test_set = TensorDataset(images[:360], labels[:360])
    train_loader = DataLoader(
        train_set, batch_size, shuffle=True, drop_last=True, generator=generator
    )
    return train_loader, DataLoader(test_set, 128)


def make_model() -> nn.Module:
    """Return a convolutional network: logits [B, 10] of images [B, 1, 8, 8]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Return accuracy and mean loss; each sample counts once."""
    right, losses = [], []
    for images, labels in loader:
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        found, loss = accelerator.gather_for_metrics((logits.argmax(dim=1) == labels, loss))
        right.append(found)
        losses.append(loss)
    accuracy, loss = (torch.cat(rows).float().mean().item() for rows in (right, losses))
    return {"accuracy": round(accuracy, 4), "loss": round(loss, 4)}


def main() -> None:
    """Train and evaluate."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(args.seed)
    train_loader, test_loader = make_loaders(args.batch_size, args.seed)
    model = make_model()
    optimizer = AdamWScheduleFree(model.parameters(), lr=args.lr, warmup_steps=args.warmup_steps)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(args.epochs):
        model.train()
        optimizer.train()
        for images, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        optimizer.eval()
        metrics = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: {metrics}")

    accelerator.print(json.dumps(metrics))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=1e-2, help="after the warm-up, for good")
    parser.add_argument("--warmup_steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
