"""Samples of tokens as rows: packed, padded, or one at a time; and a tiny model for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from runner.data.datasets import Data
from runner.language.models import IGNORED, hf_causal_lm
from runner.language.objectives import CausalLM
from tests.runner import loops

VOCABULARY, CONTEXT = 97, 24
LENGTHS = (5, 9, 10, 24, 14, 3, 7, 13)  # in the order in which they fill rows of 24
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "vocab_size": VOCABULARY}
LLAMA |= {"intermediate_size": 64, **SIZES}
Row = dict[str, Tensor]
NAMES = ("token_accuracy", "loss", "perplexity")


def samples() -> list[Row]:
    """Return samples of several lengths; in every other one, the first half does not count."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 2 if number % 2 else 1] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def padded() -> list[Row]:
    return [
        {name: _filled(value, IGNORED if name == "labels" else 0) for name, value in row.items()}
        | {"attention_mask": _filled(torch.ones_like(row["input_ids"]), 0)}
        for row in samples()
    ]


def packed(fill: bool = False) -> list[Row]:
    """Return samples one behind the other in rows; their number is even if `fill`."""
    rows: list[list[Row]] = [[]]
    for sample in samples():
        if sum(len(one["labels"]) for one in [*rows[-1], sample]) > CONTEXT:
            rows.append([])
        rows[-1].append(sample)
    found = []
    for row in [*rows, *([[]] if fill and len(rows) % 2 else [])]:
        missing = CONTEXT - sum(len(one["labels"]) for one in row)
        empty = torch.zeros(missing, dtype=torch.int64)
        row.append({"input_ids": empty, "labels": torch.full_like(empty, IGNORED)})
        positions = [torch.arange(len(one["labels"])) for one in row]
        both = {name: torch.cat([one[name] for one in row]) for name in ("input_ids", "labels")}
        found.append({**both, "position_ids": torch.cat(positions)})
    return found


def _filled(values: Tensor, value: int) -> Tensor:
    return nn.functional.pad(values, (0, CONTEXT - len(values)), value=value)


def tiny(**arguments: Any) -> Any:
    """Return a tiny Llama, the same at each call, with losses in chunks of 7 tokens."""
    torch.manual_seed(3)
    model: Any = hf_causal_lm(**{"config": LLAMA, **arguments})
    model.get_output_embeddings().chunk = 7
    return model


def batch_of(rows: Sequence[Row]) -> Row:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train(
    folder: str,
    layout: Callable[[], Any],
    model: Any = None,
    resume_from: str | None = None,
    **changes: Any,
) -> list[float]:
    """Train three steps, each on all rows; return their losses, and the last evaluation."""
    rows = layout()
    known = {"trainer__global_batch_size": len(rows), "trainer__clip_grad_norm": 1.0}
    recipe = loops.recipe_of(**{"trainer__epochs": 3, **known, **changes})
    parts = {
        "model": model or tiny(),
        "objective": CausalLM(),
        "make_optimizer": lambda m: SGD(m.parameters(), lr=0.3),
    }
    parts |= {"data": Data(rows, rows), "resume_from": resume_from}
    loops.run(Path(folder), recipe, **parts)
    records = [*loops.records(Path(folder)), loops.records(Path(folder), "validation")[-1]]
    loops.forget()
    return [record[name] for record in records for name in NAMES if name in record]
