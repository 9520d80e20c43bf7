"""Train a small Llama on the documentation of Python's standard library, byte by byte.

    python examples/scripts/causal_language_model.py --output_dir runs/llama
    accel launch --num_processes 2 --cpu examples/scripts/causal_language_model.py

The text is cut into blocks of one length. An optimizer step accumulates gradients over
micro-batches, each process on its own; the number of samples in a step is the same on any number
of processes.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from accel import Accelerator
from accel.utils import set_seed


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the library's modules, their classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text


def read_blocks(length: int, limit: int) -> Tensor:
    """Return bytes [N, T]: blocks of T = `length`, of which there are at most `limit`."""
    text = "\n\n".join(docstrings()).encode()[: limit * length]
    return torch.tensor(list(text[: len(text) // length * length])).view(-1, length)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean cross-entropy of a byte in nats; each block counts once."""
    model.eval()
    losses = []
    for blocks in loader:
        logits = model(input_ids=blocks).logits[:, :-1].float().transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, blocks[:, 1:], reduction="none")
        losses.append(accelerator.gather_for_metrics(loss.mean(dim=1)))
    return torch.cat(losses).mean().item()


def main() -> None:
    """Train, evaluate and save."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(args.seed)

    order = torch.Generator().manual_seed(args.seed)
    blocks = read_blocks(args.block_size, args.limit)
    blocks = blocks[torch.randperm(len(blocks), generator=order)]
    test_set, train_set = blocks.split([len(blocks) // 10, len(blocks) - len(blocks) // 10])
    parts = accelerator.num_processes * args.gradient_accumulation_steps
    if args.batch_size % parts:
        raise SystemExit(f"--batch_size: give a multiple of {parts}, the micro-batches of a step")
    micro_batch = args.batch_size // parts
    whole_steps = len(train_set) // args.batch_size * args.batch_size
    train_loader = DataLoader(train_set[:whole_steps], micro_batch, shuffle=True, generator=order)
    test_loader = DataLoader(test_set, 64)

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=args.block_size,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    # At an optimizer step the prepared schedule moves once for each process.
    steps, moves = args.epochs * whole_steps // args.batch_size, accelerator.num_processes
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10 * moves, steps * moves)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    for _ in range(args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    loss = evaluate(accelerator, model, test_loader)
    if args.output_dir:
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            args.output_dir,
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
        )
    accelerator.print(json.dumps({"loss": round(loss, 4), "perplexity": round(math.exp(loss), 3)}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of an optimizer step")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3, help="the highest of the schedule")
    parser.add_argument("--block_size", type=int, default=128, help="bytes")
    parser.add_argument("--limit", type=int, default=3000, help="blocks to use")
    parser.add_argument("--output_dir", help="where the model is saved, as transformers loads it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
