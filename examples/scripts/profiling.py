"""Profile some steps of a training: the dearest operators, and a trace for Perfetto.

    python examples/scripts/profiling.py --output_dir runs/profile
    accel launch --num_processes 2 --cpu examples/scripts/profiling.py

The first steps, which are slower, are left out. With `--output_dir`, each process writes
`profile_<rank>.json` there, which https://ui.perfetto.dev shows.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProfileKwargs, set_seed

# Steps that the profiler ignores, records and forgets, and records; once.
SCHEDULE = {"wait": 5, "warmup": 1, "active": 3, "repeat": 1}


def make_dataset(num_samples: int, seed: int) -> TensorDataset:
    """Return images [N, 1, 16, 16], each with one bright quarter, and its number [N]."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_samples, 1, 16, 16, generator=generator)
    labels = torch.randint(4, (num_samples,), generator=generator)
    for quarter in range(4):
        row, column = 8 * (quarter // 2), 8 * (quarter % 2)
        images[labels == quarter, :, row : row + 8, column : column + 8] += 0.3
    return TensorDataset(images, labels)


def make_model() -> nn.Module:
    """Return a convolutional network: logits [B, 4] of images [B, 1, 16, 16]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 4)
    )


def main() -> None:
    """Train under the profiler, print its table, and evaluate."""
    args = parse_args()
    on_gpu = torch.cuda.is_available() and not args.cpu
    profile = ProfileKwargs(
        activities=["cpu", "cuda"] if on_gpu else ["cpu"],
        schedule_option=SCHEDULE,
        profile_memory=True,
        output_trace_dir=args.output_dir,
    )
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[profile],
    )
    set_seed(args.seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)
    train_set, test_set = make_dataset(2048, seed=1), make_dataset(512, seed=2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_set, args.batch_size, shuffle=True, generator=order),
        DataLoader(test_set, 128),
    )

    with accelerator.profile() as profiler:
        for _ in range(args.epochs):
            for images, labels in train_loader:
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
    operators = profiler.key_averages()
    if accelerator.is_main_process:
        print(operators.table(sort_by="self_cpu_time_total", row_limit=10), file=sys.stderr)
    convolutions = [event.count for event in operators if event.key == "aten::conv2d"]

    model.eval()
    right, losses = [], []
    for images, labels in test_loader:
        with torch.no_grad():
            logits = model(images)
        logits, labels = accelerator.gather_for_metrics((logits, labels))
        right.append(logits.argmax(dim=1) == labels)
        losses.append(nn.functional.cross_entropy(logits, labels, reduction="none"))
    accuracy, loss = (torch.cat(rows).float().mean().item() for rows in (right, losses))
    metrics = {"accuracy": round(accuracy, 4), "loss": round(loss, 4)}
    accelerator.print(json.dumps({**metrics, "convolutions": sum(convolutions)}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", help="where the traces are written")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64, help="over all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
