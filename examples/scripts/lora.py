"""Train a small language model on one kind of text, then adapt it to another with LoRA.

    python examples/scripts/lora.py --output_dir runs/adapter
    accel launch --num_processes 2 --cpu examples/scripts/lora.py

The base model learns Python's source text; then it is frozen, and low-rank adapters learn to write
the numbers of a table. Only the adapters are saved.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed

BLOCK = 64  # bytes of a sample


def read_blocks(kind: str, limit: int) -> Tensor:
    """Return bytes [N, T] of Python's library ("code") or of a table of squares ("numbers")."""
    if kind == "numbers":
        text = ", ".join(str(number * number) for number in range(1, 20_000)).encode()
    else:
        library = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(library.glob("a*.py")))
    text = text[: limit * BLOCK]
    return torch.tensor(list(text[: len(text) // BLOCK * BLOCK])).view(-1, BLOCK)


def train(
    accelerator: Accelerator, model: nn.Module, data: Tensor, lr: float, args: argparse.Namespace
) -> nn.Module:
    """Train what is trainable of a model; return the model as prepared."""
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, generator=order)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _ in range(args.epochs):
        for blocks in loader:
            accelerator.backward(model(input_ids=blocks, labels=blocks).loss)
            accelerator.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, data: Tensor) -> float:
    """Return the mean cross-entropy of a byte in nats."""
    model.eval()
    losses = []
    for blocks in accelerator.prepare(DataLoader(data, 64)):
        logits = model(input_ids=blocks).logits[:, :-1].float().transpose(1, 2)
        loss = nn.functional.cross_entropy(logits, blocks[:, 1:], reduction="none")
        losses.append(accelerator.gather_for_metrics(loss.mean(dim=1)))
    return torch.cat(losses).mean().item()


def main() -> None:
    """Train the base, adapt it, and compare."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    code = read_blocks("code", args.limit)
    base = train(accelerator, LlamaForCausalLM(config), code, args.lr, args)

    numbers = read_blocks("numbers", args.limit)
    test_set, train_set = numbers[::10], numbers[torch.arange(len(numbers)) % 10 > 0]
    before = evaluate(accelerator, base, test_set)
    base = accelerator.unwrap_model(base)
    accelerator.free_memory()
    adapters = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = train(accelerator, get_peft_model(base, adapters), train_set, args.lora_lr, args)
    after = evaluate(accelerator, model, test_set)

    unwrapped = accelerator.unwrap_model(model)
    if args.output_dir and accelerator.is_main_process:
        unwrapped.save_pretrained(args.output_dir)
    trained, total = unwrapped.get_nb_trainable_parameters()
    found = {"loss": after, "loss_before": before, "trainable": trained / total}
    accelerator.print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="of the base, then of the adapters")
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the base")
    parser.add_argument("--lora_lr", type=float, default=5e-3, help="of the adapters")
    parser.add_argument("--rank", type=int, default=8, help="of an adapter's matrices")
    parser.add_argument("--limit", type=int, default=1500, help="blocks of each text to use")
    parser.add_argument("--output_dir", help="where the adapters are saved")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
