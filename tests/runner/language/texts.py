"""A small tokenizer, files of text and the rows that are made of them, for the tests of data."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runner.data.datasets import Data
from runner.language.sources import text_data
from runner.language.tokenizer import train_bpe

SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "pe", "ra", "so", "tu")


def words(count: int, seed: int) -> str:
    """Return a text of so many words; one of another seed differs."""
    draw = random.Random(seed)
    made = ("".join(draw.choices(SYLLABLES, k=2)) for _ in range(count))
    return f"text {seed}: {' '.join(made)}"


def save_tokenizer(folder: Path) -> str:
    """Save a byte-level BPE of 300 tokens, and return its folder."""
    train_bpe((words(50, seed) for seed in range(20)), 300).save_pretrained(folder)
    return str(folder)


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def texts_of(path: Path, sizes: Iterable[int], seed: int = 0) -> str:
    """Write a JSONL file of texts with so many words each."""
    return write_jsonl(path, [{"text": words(n, seed + i)} for i, n in enumerate(sizes)])


def made(folder: Path, **arguments: Any) -> Data:
    """Return the data of the factory, with a cache of the test's own."""
    return text_data(**{"context": 64, "cache_dir": str(folder / "cache"), **arguments})
