"""Fine-tune a small BERT to say which module of the standard library some lines are from.

    python examples/scripts/text_classification.py
    accel launch --num_processes 2 --cpu examples/scripts/text_classification.py

The model is built from its configuration and the data is Python's own source text, so nothing is
downloaded. Batches are padded to their longest text and split over the processes.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, set_seed

MODULES = ("_pydecimal", "argparse", "inspect", "tarfile")  # the classes
LINES = 4  # of a text
PAD, CLS, UNKNOWN = 0, 1, 2

Sample = tuple[list[str], int]


def read_texts() -> list[Sample]:
    """Return texts as words, each with the index of its module."""
    samples = []
    for label, name in enumerate(MODULES):
        source = Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text("utf-8")
        lines = [line for line in source.splitlines() if line.strip()]
        texts = ("\n".join(lines[i : i + LINES]) for i in range(0, len(lines), LINES))
        samples += [(re.findall(r"[a-z]+|[^\sa-z]", text.lower()), label) for text in texts]
    return samples


class Tokenizer:
    """Gives the most frequent words of the training texts ids of their own.

    Args:
        samples: the training texts.
        size: number of ids.
    """

    def __init__(self, samples: list[Sample], size: int) -> None:
        counts = Counter(word for words, _ in samples for word in words)
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 3]
        self.ids = {word: number for number, word in enumerate(frequent, start=3)}

    def __call__(self, samples: list[Sample], max_length: int = 48) -> dict[str, Tensor]:
        """Return a padded batch: `input_ids` and `attention_mask` [B, T], `labels` [B]."""
        rows = [[CLS, *(self.ids.get(word, UNKNOWN) for word in words)] for words, _ in samples]
        texts = [torch.tensor(row[:max_length]) for row in rows]
        input_ids = pad_sequence(texts, batch_first=True, padding_value=PAD)
        labels = torch.tensor([label for _, label in samples])
        return {"input_ids": input_ids, "attention_mask": input_ids.ne(PAD), "labels": labels}


def main() -> None:
    """Train and evaluate."""
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(args.seed)

    order = torch.Generator().manual_seed(args.seed)
    texts = read_texts()
    texts = [texts[i] for i in torch.randperm(len(texts), generator=order).tolist()]
    train_set, test_set = texts[len(texts) // 5 :], texts[: len(texts) // 5]
    tokenizer = Tokenizer(train_set, args.vocab_size)
    train_loader = DataLoader(
        train_set, args.batch_size, True, collate_fn=tokenizer, drop_last=True, generator=order
    )
    test_loader = DataLoader(test_set, 128, collate_fn=tokenizer)

    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        num_labels=len(MODULES),
        hidden_dropout_prob=0.0,  # each process would draw its own
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    for _ in range(args.epochs):
        model.train()
        for batch in train_loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    right, losses = [], []
    for batch in test_loader:
        with torch.no_grad():
            logits = model(**batch).logits
        logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
        right.append(logits.argmax(dim=1) == labels)
        losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
    accuracy, loss = (torch.cat(rows).float().mean().item() for rows in (right, losses))
    accelerator.print(json.dumps({"accuracy": round(accuracy, 4), "loss": round(loss, 4)}))
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest of the schedule")
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
