"""Train, be cut off anywhere, go on, and end with the same weights bit for bit.

    python examples/checkpoint_resume.py --crash-after 25
    python examples/checkpoint_resume.py --resume
    python -m torch.distributed.run --nproc-per-node 2 examples/checkpoint_resume.py

Every few steps the full state is saved: model, optimizer, schedule, random numbers, the order of
the samples and how far in it the training is. A checkpoint counts only once it is complete, so the
training may end at any moment, also while it saves. It resumes in mid-epoch, with as many processes
as it began with.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import ProjectConfiguration, set_seed

NUM_FEATURES = 16
NUM_SAMPLES = 512


class Progress:
    """How far the training is; saved and loaded with the state.

    Attributes:
        epoch: the one under way, from 0.
        batches: how many of its batches are done, on each process.
        steps: optimizer steps since the beginning.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """Return the state."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        vars(self).update(state)


def make_dataset() -> TensorDataset:
    """Return inputs [N, 16] and the outputs of a fixed network: [N, 1]."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    mixed = inputs @ torch.randn(NUM_FEATURES, 4, generator=generator)
    return TensorDataset(inputs, torch.tanh(mixed).sum(dim=1, keepdim=True))


def make_model() -> nn.Module:
    """Return a network with dropout, which draws random numbers at each step."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))


def digest(model: nn.Module) -> str:
    """Return a fingerprint of a model's weights, bit for bit."""
    state = model.state_dict()
    data = b"".join(state[name].cpu().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(data).hexdigest()[:16]


@torch.no_grad()
def mean_squared_error(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the mean squared error over all samples; each counts once."""
    model.eval()
    errors = []
    for inputs, targets in loader:
        squares = (model(inputs) - targets).square()
        errors.append(accelerator.gather_for_metrics(squares))
    return torch.cat(errors).mean().item()


def main() -> None:
    """Train from the beginning, or from the newest checkpoint."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            args.project_dir, automatic_checkpoint_naming=True, total_limit=3
        ),
    )
    set_seed(args.seed)
    data = make_dataset()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        DataLoader(data, args.batch_size, shuffle=True),
        DataLoader(data, 128),
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state()  # the newest complete checkpoint
        accelerator.print(
            f"resumed after step {progress.steps}: epoch {progress.epoch}, "
            f"batch {progress.batches} of {len(train_loader)}"
        )

    while progress.epoch < args.epochs:
        model.train()
        train_loader.set_epoch(progress.epoch)
        batches: Iterable[tuple[Tensor, Tensor]] = train_loader
        if progress.batches > 0:
            batches = accelerator.skip_first_batches(train_loader, progress.batches)
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.batches += 1
            if accelerator.sync_gradients:
                progress.steps += 1
                if progress.steps % args.save_every == 0:
                    accelerator.save_state()
                if progress.steps == args.crash_after:
                    os.kill(os.getpid(), signal.SIGKILL)  # as a power cut would
        progress.epoch += 1
        progress.batches = 0

    error = mean_squared_error(accelerator, model, test_loader)
    weights = digest(accelerator.unwrap_model(model))
    accelerator.print(f"{progress.steps} steps: error {error:.4f}, weights {weights}")
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    parser.add_argument("--crash-after", type=int, help="kill this process after so many steps")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="of one process")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/checkpoint_resume"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
