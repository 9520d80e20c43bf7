"""Cross-validate a classifier of scikit-learn's digits, and test the ensemble of the folds.

    python examples/scripts/cross_validation.py --num_folds 5
    accel launch --num_processes 2 --cpu examples/scripts/cross_validation.py

Each fold trains a new model on all processes. Metrics are computed over every sample exactly once:
`gather_for_metrics` drops those that only filled up a last batch.
"""

from __future__ import annotations

import argparse
import json

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed


def train(
    accelerator: Accelerator, data: Subset | TensorDataset, args: argparse.Namespace
) -> nn.Module:
    """Return a model trained on `data`."""
    model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, generator=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(args.epochs):
        for images, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    return model


@torch.no_grad()
def predict(accelerator: Accelerator, model: nn.Module, data: Subset) -> tuple[Tensor, Tensor]:
    """Return logits [N, 10] and labels [N] of all samples, the same on every process."""
    model.eval()
    rows = []
    for images, labels in accelerator.prepare(DataLoader(data, 64)):
        rows.append(accelerator.gather_for_metrics((model(images), labels)))
    logits, labels = (torch.cat(column).cpu() for column in zip(*rows, strict=True))
    return logits, labels


def main() -> None:
    """Train a model per fold and report the metrics of the folds and of their ensemble."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(args.seed)
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    data = TensorDataset(images, torch.from_numpy(digits.target).long())
    rest, test = train_test_split(
        range(len(data)), test_size=0.2, stratify=digits.target, random_state=args.seed
    )

    folds = StratifiedKFold(args.num_folds, shuffle=True, random_state=args.seed)
    accuracies, ensemble = [], torch.zeros(len(test), 10)
    for number, (train_part, part) in enumerate(folds.split(rest, digits.target[rest])):
        model = train(accelerator, Subset(data, [rest[i] for i in train_part]), args)
        logits, labels = predict(accelerator, model, Subset(data, [rest[i] for i in part]))
        assert len(labels) == len(part)  # no sample twice
        accuracies.append((logits.argmax(dim=1) == labels).float().mean().item())
        accelerator.print(f"fold {number}: accuracy {accuracies[-1]:.4f}")
        logits, test_labels = predict(accelerator, model, Subset(data, test))
        ensemble += logits.softmax(dim=1) / args.num_folds
        accelerator.free_memory()

    found = ensemble.argmax(dim=1)
    metrics = {
        "accuracy": sum(accuracies) / len(accuracies),
        "test_accuracy": (found == test_labels).float().mean().item(),
        "test_f1": float(f1_score(test_labels, found, average="macro")),
        "test_loss": nn.functional.nll_loss(ensemble.log(), test_labels).item(),
    }
    accelerator.print(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--width", type=int, default=64, help="of the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
