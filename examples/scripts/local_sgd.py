"""Train with local SGD: processes exchange weights every few steps, and never gradients.

    accel launch --num_processes 2 --cpu examples/scripts/local_sgd.py

With `--local_sgd_steps 1` two processes train as one does on their batches together, since the mean
of weights after a step of plain SGD is the step with the mean of gradients.

Source: https://arxiv.org/abs/1805.09767
"""

from __future__ import annotations

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.local_sgd import LocalSGD
from accel.utils import DataLoaderConfiguration, set_seed


def make_loaders(batch_size: int, seed: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders of training and test: images [B, 64] in [0, 1], labels [B]."""
    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits.target), generator=generator)
    images = torch.from_numpy(digits.data).float()[order] / 16
    labels = torch.from_numpy(digits.target).long()[order]
    train_set = TensorDataset(images[360:], labels[360:])
    test_set = TensorDataset(images[:360], labels[:360])
    train_loader = DataLoader(
        train_set, batch_size, shuffle=True, drop_last=True, generator=generator
    )
    return train_loader, DataLoader(test_set, 128)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Return accuracy and mean loss; each sample counts once."""
    model.eval()
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
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(args.seed)
    train_loader, test_loader = make_loaders(args.batch_size, args.seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    with LocalSGD(accelerator, model, args.local_sgd_steps) as local_sgd:
        for _ in range(args.epochs):
            model.train()
            for images, labels in train_loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    accelerator.print(json.dumps(evaluate(accelerator, model, test_loader)))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_sgd_steps", type=int, default=8, help="between two averages")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
