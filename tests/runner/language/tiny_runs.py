"""Tiny language models and tokenizers, and runs of them, for the tests of texts and exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from runner.data.datasets import Data
from runner.recipe.factory import register
from runner.recipe.schema import Recipe
from runner.runs.job import Job
from runner.training.step import Objective

WORDS = (
    *("<end>", "<user>", "<reply>", "the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran"),
    *("far", "from", "here", ".", "to", "be"),
)
TEMPLATE = (
    "{% for m in messages %}<{{ 'user' if m.role == 'user' else 'reply' }}> {{ m.content }} <end>"
    "{% endfor %}{% if add_generation_prompt %}<reply>{% endif %}"
)
LENGTH = 12


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """Return a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="."))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens(list(WORDS[:3]))
    return PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<end>", pad_token="<end>", chat_template=template
    )


def model(dropout: float = 0.0) -> Any:
    """Return a Llama whose weights are drawn from torch's generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


class Rows(Dataset[Any]):
    """Rows of words in an order that repeats."""

    def __init__(self, size: int) -> None:
        self.ids = (torch.arange(size)[:, None] + torch.arange(LENGTH)) % (len(WORDS) - 3) + 3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def data(folder: Path | None, size: int = 40) -> Data:
    """Return rows, and a tokenizer in a folder."""
    made = Data(Rows(size), Rows(8))
    if folder is not None:
        tokenizer().save_pretrained(folder)
        made.artifacts = {"tokenizer": folder}  # type: ignore[attr-defined]
    return made


class NextToken(Objective):
    def losses(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
        return losses.sum(1)

    def weights(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).sum(1)


register.model("tiny_llama")(model)
register.objective("tiny_next_token")(NextToken)


def finish(run_dir: Path, recipe: Recipe) -> None:
    """Write what a run keeps beside its checkpoints, so that it can be used."""
    recipe.model, recipe.objective = {"name": "tiny_llama"}, {"name": "tiny_next_token"}
    recipe.step, recipe.data = {"name": "supervised"}, {"name": "digits"}
    recipe.optimizer = {"name": "adamw"}
    Job(run_dir, overrides=(), cwd=str(run_dir)).save(recipe)
    tokenizer().save_pretrained(run_dir / "artifacts" / "tokenizer")
