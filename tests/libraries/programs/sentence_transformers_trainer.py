"""sentence-transformers: its trainer, on pairs of sentences in memory, with contrastive losses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from transformers import GPT2Model, set_seed

from tests.libraries.programs import tiny
from tests.libraries.programs.transformers_trainer import ARGUMENTS, history


def encoder(folder: Path) -> SentenceTransformer:
    """Return a sentence encoder over a tiny model, which it wants to read from a folder."""
    GPT2Model(tiny.configuration()).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    words = models.Transformer(str(folder), max_seq_length=16)
    pooling = models.Pooling(tiny.configuration().n_embd, "mean")
    return SentenceTransformer(modules=[words, pooling], device="cpu")


def run(options: Mapping[str, Any], folder: Path) -> dict[str, list]:
    """Train on pairs for two epochs and evaluate."""
    set_seed(41)
    model = encoder(folder.parent / f"start{id(folder)}")
    given = {**ARGUMENTS, "num_train_epochs": 2, "save_strategy": "epoch", **options}

    def pairs(count: int, seed: int) -> Dataset:
        return Dataset.from_dict(
            {"anchor": tiny.sentences(count, seed), "positive": tiny.sentences(count, seed + 50)}
        )

    trained = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(output_dir=str(folder), **given),
        train_dataset=pairs(38, 3),
        eval_dataset=pairs(
            16, 4
        ),  # with drop_last on two ranks, the public one counts a quarter of 10
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trained.train()
    result: dict[str, list] = dict(history(trained))
    result["weights"] = [tiny.digest(trained.accelerator.unwrap_model(trained.model))]
    trained.accelerator.wait_for_everyone()
    result["files"] = tiny.files(folder)
    return result
