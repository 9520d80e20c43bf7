"""Train a tiny GPT on the source text of Python's standard library, as bytes.

    python examples/language_model.py
    python -m torch.distributed.run --nproc-per-node 2 examples/language_model.py

A sample is the beginning of a class or a function: lengths differ, and batches are
padded. The loss of an optimizer step is its summed loss over its number of bytes, whatever is
padding, however many micro-batches it accumulates and however many processes share them; so any
number of processes trains the same model.

Shapes: B samples, T bytes, D width, V = 256 byte values.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.run.loss_normalization import global_weight, normalize_loss
from accel.utils import set_seed

NUM_BYTES = 256
IGNORED = -100  # a target that is padding
MIN_LENGTH = 16  # of a definition, in bytes
VALIDATION_SHARE = 0.1

Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """A decoder-only transformer on bytes.

    Args:
        dim: D.
        num_layers: how many blocks.
        context: the largest T.
    """

    def __init__(self, dim: int, num_layers: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(NUM_BYTES, dim)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(context, dim))
        block = nn.TransformerEncoderLayer(
            dim, dim // 32, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, NUM_BYTES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [B, T, V] of bytes [B, T], each from the bytes before it and itself."""
        length = inputs.shape[1]
        x = self.byte_embedding(inputs) + self.position_embedding[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))


def read_definitions(context: int, limit: int) -> list[Tensor]:
    """Return the definitions of the library's modules, each cut after `context` + 1 bytes.

    Args:
        context: the largest T.
        limit: how many at most, taken evenly over the library.
    """
    definitions: list[bytes] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        definitions += re.split(rb"\n(?= *(?:def|class) )", path.read_bytes())
    long = [text[: context + 1] for text in definitions if len(text) >= MIN_LENGTH]
    evenly = long[:: max(1, len(long) // limit)]
    return [torch.tensor(list(text)) for text in evenly[:limit]]


def collate(texts: list[Tensor]) -> Batch:
    """Return inputs [B, T] and targets [B, T], of which those that are padding are ignored."""
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    return inputs, targets


def in_windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each optimizer step; the last step may have fewer than `size`."""
    rest = iter(batches)
    while window := list(itertools.islice(rest, size)):
        yield window


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, summed over its bytes, in nats: [B]."""
    logits = model(inputs).float().transpose(1, 2)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none").sum(dim=1)


@torch.no_grad()
def bits_per_byte(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the mean cross-entropy of a byte, in bits; each byte counts once."""
    model.eval()
    nats, count = 0.0, 0
    for inputs, targets in loader:
        losses = summed_loss(model, inputs, targets)
        lengths = targets.ne(IGNORED).sum(dim=1)
        losses, lengths = accelerator.gather_for_metrics((losses, lengths))
        nats += losses.double().sum().item()
        count += int(lengths.sum())
    return nats / count / math.log(2)


def train_epoch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    loader: DataLoader,
    max_norm: float,
) -> float:
    """Train on each sample once; return the mean loss of the last step, in nats."""
    model.train()
    loss = torch.zeros(())
    num_steps = accelerator.gradient_accumulation_steps
    for window in in_windows(loader, num_steps):
        # How many bytes the step has over all processes, known before its first backward pass.
        weight = global_weight([targets.ne(IGNORED) for _, targets in window], accelerator)
        loss = torch.zeros((), device=accelerator.device)
        for number, (inputs, targets) in enumerate(window, start=1):
            with accelerator.accumulate(model, sync_gradients=number == len(window)):
                total = summed_loss(model, inputs, targets).sum()
                accelerator.backward(
                    normalize_loss(
                        total,
                        weight,
                        grad_size=accelerator.parallel_dims.grad_size,
                        num_steps=num_steps,
                    )
                )
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loss += total.detach() / weight
    return accelerator.reduce(loss, reduction="sum").item()


def warm_up_then_decay(
    optimizer: torch.optim.Optimizer, num_steps: int, num_processes: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule over `num_steps` optimizer steps: a tenth up, then a cosine to a tenth.

    A prepared scheduler moves by `num_processes` at each of them.
    """
    warmup = max(1, num_steps // 10)

    def factor(moves: int) -> float:
        step = moves // num_processes
        if step < warmup:
            return (step + 1) / warmup
        share = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main() -> None:
    """Train and evaluate."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    # An optimizer step is `batches_per_step` batches, which processes share and then accumulate.
    accelerator.gradient_accumulation_steps = args.batches_per_step // accelerator.num_processes
    set_seed(args.seed)

    texts = read_definitions(args.context, args.limit)
    held_out = round(1 / VALIDATION_SHARE)
    train_set = [text for index, text in enumerate(texts) if index % held_out]
    # Whole steps, so that any number of processes has the same ones.
    steps_per_epoch = len(train_set) // (args.batch_size * args.batches_per_step)
    if steps_per_epoch == 0:
        raise SystemExit(f"--limit {args.limit}: {len(train_set)} samples are less than one step.")
    train_set = train_set[: steps_per_epoch * args.batches_per_step * args.batch_size]
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate)
    validation_loader = DataLoader(texts[::held_out], 2 * args.batch_size, collate_fn=collate)

    model = GPT(args.dim, args.num_layers, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = warm_up_then_decay(
        optimizer, args.epochs * steps_per_epoch, accelerator.num_processes
    )
    model, optimizer, scheduler, train_loader, validation_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, validation_loader
    )

    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(accelerator, model, optimizer, scheduler, train_loader, args.max_norm)
        found = bits_per_byte(accelerator, model, validation_loader)
        accelerator.print(f"epoch {epoch}: last loss {loss:.4f}, {found:.4f} bits per byte")
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of one process")
    parser.add_argument(
        "--batches-per-step",
        type=int,
        default=4,
        help="batches of an optimizer step over all processes, a multiple of their number",
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest of the schedule")
    parser.add_argument("--max-norm", type=float, default=1.0, help="of the gradients")
    parser.add_argument("--dim", type=int, default=128, help="width, a multiple of 32")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=128, help="bytes of a sample")
    parser.add_argument("--limit", type=int, default=4000, help="samples to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
