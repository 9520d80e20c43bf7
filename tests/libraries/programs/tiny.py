"""Tiny models from their configurations, and data in memory that is drawn from a seed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY, LENGTH, LABELS = 61, 12, 3


def configuration(**options: object) -> GPT2Config:
    """Return a two-layer model's configuration, with its dropout: the random draws count."""
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )


def classifier() -> PreTrainedModel:
    """Return a classifier of sequences with random weights."""
    return GPT2ForSequenceClassification(configuration(num_labels=LABELS))


def language_model() -> PreTrainedModel:
    """Return a causal language model with random weights."""
    return GPT2LMHeadModel(configuration())


class Sequences(Dataset):
    """Sequences of tokens of several lengths, each with its class."""

    def __init__(self, num_samples: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, LENGTH + 1, (num_samples,), generator=draws).tolist()
        self.rows = []
        for length in lengths:
            tokens = torch.randint(3, VOCABULARY, (length,), generator=draws)
            self.rows.append({"input_ids": tokens, "labels": int(tokens.sum()) % LABELS})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


class Stream(IterableDataset):
    """The same rows as a stream without a length."""

    def __init__(self, rows: Sequences) -> None:
        self.rows = rows

    def __iter__(self):
        yield from self.rows.rows


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Collate sequences: pad to the longest of the batch, so that widths differ."""
    width = max(len(row["input_ids"]) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    for at, row in enumerate(rows):
        tokens[at, : len(row["input_ids"])] = row["input_ids"]
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words "w3" … with a vocabulary in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(3, VOCABULARY))]
    whole = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<pad>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=32,
    )


def sentences(num_samples: int, seed: int) -> list[str]:
    """Return sentences of that tokenizer's words."""
    rows = Sequences(num_samples, seed).rows
    return [" ".join(f"w{token}" for token in row["input_ids"].tolist()) for row in rows]


def digest(tensors: dict[str, torch.Tensor] | nn.Module) -> str:
    """Return a digest of weights: equal digests are equal bits."""
    state = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    total = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        flat = value.detach().cpu().contiguous().flatten()
        total.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def files(folder: Path) -> list[str]:
    """Return the files under a folder, by their relative paths."""
    return sorted(
        str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()
    )
