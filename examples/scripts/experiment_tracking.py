"""Train a classifier of scikit-learn's digits and log it to any experiment tracker.

    python examples/scripts/experiment_tracking.py --log_with tensorboard --project_dir runs
    accel launch --num_processes 2 --cpu examples/scripts/experiment_tracking.py

Hyperparameters, the loss of steps and the accuracy of epochs go to all trackers that `--log_with`
names; the main process alone writes.
"""

from __future__ import annotations

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed


def make_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders of training and test: images [B, 64] in [0, 1], labels [B]."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.data).float()[order] / 16
    labels = torch.from_numpy(digits.target).long()[order]
    train_set = TensorDataset(images[360:], labels[360:])
    test_set = TensorDataset(images[:360], labels[:360])
    train_loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True)
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
    """Train, and log what happens."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        log_with=args.log_with,
        project_config=ProjectConfiguration(args.project_dir, logging_dir=args.project_dir),
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    set_seed(args.seed)
    hyperparameters = {"lr": args.lr, "batch_size": args.batch_size, "epochs": args.epochs}
    accelerator.init_trackers("digits", config=hyperparameters)

    train_loader, test_loader = make_loaders(args.batch_size)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    step = 0
    metrics = evaluate(accelerator, model, test_loader)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.log_every == 0:
                mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                accelerator.log({"train/loss": mean, "epoch": epoch}, step=step)
        metrics = evaluate(accelerator, model, test_loader)
        accelerator.log({f"test/{name}": value for name, value in metrics.items()}, step=step)

    accelerator.print(json.dumps(metrics))
    accelerator.end_training()  # the trackers write what is left


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log_with", nargs="+", default=["tensorboard"], help="wandb, mlflow, …")
    parser.add_argument("--project_dir", default="runs", help="where local trackers write")
    parser.add_argument("--log_every", type=int, default=10, help="steps")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
