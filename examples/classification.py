"""Classify scikit-learn's 1,797 scanned digits with a small convolutional network.

    python examples/classification.py
    python -m torch.distributed.run --nproc-per-node 2 examples/classification.py

Any number of processes trains the same model: each batch is split over them. The weights that did
best on the validation part are kept, and tested at the end.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed

SIZES = (1257, 180, 360)  # training, validation, test
NUM_CLASSES = 10


class CNN(nn.Module):
    """Two convolutions and a linear layer.

    Args:
        width: channels of the first convolution; the second has twice as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width * 4 * 4, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 1, 8, 8]."""
        return self.head(self.features(images).flatten(1))


def make_datasets() -> list[TensorDataset]:
    """Return the parts: images [N, 1, 8, 8] in [0, 1] and labels [N]."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    # Neighbours in the file are of the same writer, so the parts are drawn, always alike.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(images[part], labels[part]) for part in order.split(SIZES)]


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the share of samples whose class is right; each sample counts once."""
    model.eval()
    correct, total = 0, 0
    for images, labels in loader:
        found = model(images).argmax(dim=1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        correct += int((found == labels).sum())
        total += len(labels)
    return correct / total


def train_epoch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    loader: DataLoader,
) -> float:
    """Train on each sample once; return the mean loss in nats."""
    model.train()
    losses = []
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()


def main() -> None:
    """Train, keep the best weights and test them."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    set_seed(args.seed)
    train_set, validation_set, test_set = make_datasets()
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    validation_loader = DataLoader(validation_set, 120)
    test_loader = DataLoader(test_set, 120)

    model = CNN(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps + 1)
    model, optimizer, scheduler, train_loader, validation_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, validation_loader, test_loader
    )

    best = 0.0
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(accelerator, model, optimizer, scheduler, train_loader)
        accuracy = evaluate(accelerator, model, validation_loader)
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            accelerator.save_model(model, args.output_dir / "best")

    accelerator.wait_for_everyone()
    weights = load_file(args.output_dir / "best" / "model.safetensors")
    accelerator.unwrap_model(model).load_state_dict(weights)
    accelerator.print(f"test accuracy {evaluate(accelerator, model, test_loader):.4f}")
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-3, help="the highest of the schedule")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/classification"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
