"""Keep the batch size that a training was tuned for, on as little memory as there is.

    python examples/scripts/automatic_gradient_accumulation.py --holds 40
    accel launch --num_processes 2 --cpu \
        examples/scripts/automatic_gradient_accumulation.py

A micro-batch that fits is looked for first, on each process by itself; then all of them take the
smallest, and accumulate gradients until an optimizer step has seen `--observed_batch_size` samples.
So the result depends neither on the memory nor on the number of processes.
"""

from __future__ import annotations

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import find_executable_batch_size, gather_object, set_seed


def read_digits() -> tuple[Tensor, Tensor]:
    """Return images [N, 1, 8, 8] in [0, 1] and labels [N], in an order drawn once."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    return images[order], torch.from_numpy(digits.target).long()[order]


def make_model() -> nn.Module:
    """Return a convolutional network: logits [B, 10] of images [B, 1, 8, 8]."""
    convolution = nn.Conv2d(1, 64, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def find_micro_batch(accelerator: Accelerator, largest: int, holds: int | None) -> int:
    """Return the largest half, quarter, … of `largest` samples that every process can hold.

    Args:
        accelerator: of the run.
        largest: the first size that is tried.
        holds: samples for which memory is said to suffice, to see the search; None: what is true.
    """
    images, labels = (tensor.to(accelerator.device) for tensor in read_digits())
    model = make_model().to(accelerator.device)
    halves = iter([largest >> halvings for halvings in range(1, largest.bit_length() + 1)])

    @find_executable_batch_size(
        starting_batch_size=largest, reduce_batch_size_fn=lambda: next(halves)
    )
    def attempt(size: int) -> int:
        if holds is not None and size > holds:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        nn.functional.cross_entropy(model(images[:size]), labels[:size]).backward()
        return size

    return min(gather_object([attempt()]))


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
    """Find a micro-batch, train and evaluate."""
    args = parse_args()
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    share = args.observed_batch_size // accelerator.num_processes
    if args.observed_batch_size % accelerator.num_processes:
        raise SystemExit(f"--observed_batch_size: give a multiple of {accelerator.num_processes}")
    fits = find_micro_batch(accelerator, share, args.holds)
    micro_batch = max(size for size in range(1, fits + 1) if share % size == 0)
    accelerator.gradient_accumulation_steps = share // micro_batch

    set_seed(args.seed)
    order = torch.Generator().manual_seed(args.seed)
    images, labels = read_digits()
    whole_steps = len(images[360:]) // args.observed_batch_size * args.observed_batch_size
    train_set = TensorDataset(images[360:][:whole_steps], labels[360:][:whole_steps])
    test_set = TensorDataset(images[:360], labels[:360])
    model = make_model()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=args.lr),
        DataLoader(train_set, micro_batch, shuffle=True, generator=order),
        DataLoader(test_set, micro_batch),
    )
    for _ in range(args.epochs):
        model.train()
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    metrics = evaluate(accelerator, model, test_loader)
    found = {"micro_batch": micro_batch, "accumulation": accelerator.gradient_accumulation_steps}
    accelerator.print(json.dumps({**metrics, **found}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observed_batch_size", type=int, default=128, help="of a step")
    parser.add_argument("--holds", type=int, help="samples at once, less than there is memory for")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
