"""Runs of a tiny Llama on texts, for the tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from runner.recipe.schema import Recipe
from runner.runs import directory
from runner.runs.job import Job
from runner.training import build
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.language import rows, texts

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": FullyShardedDataParallelPlugin()},
    "zero3": {"deepspeed": DeepSpeedPlugin(zero_stage=3)},
    "tp": {"tensor_parallel": TorchTensorParallelPlugin(tp_size=2)},
}
CONFIG = {**rows.LLAMA, "vocab_size": 300, "attention_dropout": 0.2, "initializer_range": 0.3}


def recipe_of(folder: Path, tokenizer: str, engine: str = "ddp", **nodes: Any) -> Recipe:
    """Return a recipe of four steps, with an evaluation before them and after each other one."""
    given = {"name": "jsonl", "tokenizer": tokenizer, "context": 32, "cache_dir": str(folder / "c")}
    for split, seed in (("train", 0), ("validation", 99)):
        folder.mkdir(exist_ok=True)
        given[split] = texts.texts_of(folder / f"{split}.jsonl", [9] * 16, seed)
    nodes = {"model": {"name": "hf_causal_lm", "config": CONFIG}, **ENGINES[engine], **nodes}
    return loops.recipe_of(
        trainer__max_steps=4,
        trainer__epochs=None,
        trainer__eval_every=2,
        trainer__eval_first=True,
        step={"name": "supervised"},
        data=given,
        objective={"name": "causal_lm"},
        optimizer={"name": "adamw"},
        **nodes,
    )


def train(folder: str, recipe: Recipe) -> None:
    """Train in this process, which may be one of several."""
    loops.forget()
    torch.manual_seed(3)
    data, step = build.build_data(recipe), build.build_step(recipe)
    callbacks = build.build_callbacks(recipe)
    loop = loops.build(
        Path(folder),
        recipe,
        data=data,
        model=step.models["model"],
        objective=step.objective,  # type: ignore[attr-defined]
        callbacks=callbacks,
    )
    loop.run()
    directory.keep_artifacts(Path(folder), data.artifacts)
    loops.forget()


def trained(run_dir: Path, recipe: Recipe, num_processes: int = 1) -> Path:
    """Train a run, and return its directory."""
    if num_processes == 1:
        train(str(run_dir), recipe)
    else:
        run_distributed(train, num_processes, str(run_dir), recipe)
    Job(run_dir, overrides=(), cwd=str(run_dir)).save(recipe)
    return run_dir
