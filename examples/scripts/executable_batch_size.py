"""Train with the largest batch that memory holds: halve it as long as memory runs out.

    python examples/scripts/executable_batch_size.py --batch_size 512 --memory_mb 300
    accel launch --num_processes 2 --cpu examples/scripts/executable_batch_size.py

Each process looks for the size by itself, with a step of an unprepared model, which waits for no
other process; then all take the smallest. (Were a whole training retried, a process that runs out
of memory would leave the others waiting for its gradients.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import find_executable_batch_size, gather_object, set_seed


@contextlib.contextmanager
def limited_memory(accelerator: Accelerator, megabytes: int) -> Iterator[None]:
    """Let this process allocate at most so many more megabytes of the device; 0: all there is."""
    if not megabytes:
        yield
    elif accelerator.device.type == "cuda":
        total = torch.cuda.get_device_properties(accelerator.device).total_memory
        torch.cuda.set_per_process_memory_fraction(megabytes * 2**20 / total, accelerator.device)
        yield
        torch.cuda.set_per_process_memory_fraction(1.0, accelerator.device)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_AS, before)


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test: images [N, 1, 8, 8] in [0, 1], labels [N]."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 16
    labels = torch.from_numpy(digits.target).long()[order]
    return TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])


def make_model(width: int) -> nn.Module:
    """Return a network that is wide, so that a sample takes about `width` / 2 kilobytes."""
    convolution = nn.Conv2d(1, width, 3, padding=1)
    return nn.Sequential(
        convolution, nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4 * width, 10)
    )


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


def find_batch_size(accelerator: Accelerator, data: TensorDataset, args: argparse.Namespace) -> int:
    """Return the largest half, quarter, … of `--batch_size` that every process can hold.

    It begins with all samples of a process where `--batch_size` is more than these.
    """
    largest = min(args.batch_size, len(data) // accelerator.num_processes)
    model = make_model(args.width).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    halves = iter([largest >> halvings for halvings in range(1, 20)])

    @find_executable_batch_size(
        starting_batch_size=largest, reduce_batch_size_fn=lambda: next(halves)
    )
    def attempt(size: int) -> int:
        optimizer.zero_grad()
        images, labels = (tensor.to(accelerator.device) for tensor in data[:size])
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        return size

    with limited_memory(accelerator, args.memory_mb):
        found = attempt()
    return min(gather_object([found]))


def main() -> None:
    """Find a batch size, train and evaluate."""
    args = parse_args()
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    train_set, test_set = make_datasets()
    batch_size = find_batch_size(accelerator, train_set, args)

    set_seed(args.seed)
    order = torch.Generator().manual_seed(args.seed)
    model = make_model(args.width)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=args.lr),
        DataLoader(train_set, batch_size, shuffle=True, drop_last=True, generator=order),
        DataLoader(test_set, min(batch_size, 128)),
    )
    for _ in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()

    metrics = evaluate(accelerator, model, test_loader)
    accelerator.print(json.dumps({**metrics, "batch_size": batch_size}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch_size", type=int, default=512, help="the first to be tried")
    parser.add_argument("--memory_mb", type=int, default=300, help="of a process for the search")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
