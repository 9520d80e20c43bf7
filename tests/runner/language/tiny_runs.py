"""Runs of a tiny Llama on texts, for the tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel.config.tensor_parallel import TorchTensorParallelPlugin
from runner.recipe.schema import Recipe
from runner.runs import directory
from runner.runs.job import Job
from runner.training import build
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.language import rows, texts
from tests.runner.training import test_strategies as engines

ENGINES: dict[str, Any] = {name: engines.ENGINES[name] for name in ("ddp", "fsdp", "zero3")}
ENGINES["tp"] = {"tensor_parallel": TorchTensorParallelPlugin(tp_size=2)}
LORA = {"_target_": "peft.LoraConfig", "r": 4, "target_modules": "all-linear"}
LLAMA = {**rows.LLAMA, "vocab_size": 300}
CONFIG = {**LLAMA, "attention_dropout": 0.2, "initializer_range": 0.3}


def recipe_of(folder: Path, tokenizer: str, engine: str = "ddp", **nodes: Any) -> Recipe:
    """Return a recipe of four steps, with an evaluation before them and after each other one."""
    files = {
        split: texts.texts_of(folder / f"{split}.jsonl", [9] * 16, seed)
        for split, seed in (("train", 0), ("validation", 99))
    }
    data = {"name": "jsonl", "tokenizer": tokenizer, "context": 32, "cache_dir": str(folder / "c")}
    given: dict[str, Any] = {
        **{"step": {"name": "supervised"}, "optimizer": {"name": "adamw"}, "data": data | files},
        **{"model": {"name": "hf_causal_lm", "config": CONFIG}, "objective": {"name": "causal_lm"}},
        **{"trainer__max_steps": 4, "trainer__epochs": None},
        **{"trainer__eval_every": 2, "trainer__eval_first": True},
    }
    return loops.recipe_of(**given | ENGINES[engine] | nodes)


def train(folder: str, recipe: Recipe) -> None:
    """Train in this process, which may be one of several."""
    loops.forget()
    torch.manual_seed(3)
    data, step = build.build_data(recipe), build.build_step(recipe)
    parts: dict[str, Any] = {"data": data, "callbacks": build.build_callbacks(recipe)}
    parts |= {"model": step.models["model"], "objective": vars(step)["objective"]}
    loops.run(Path(folder), recipe, **parts)
    loops.forget()


def trained(run_dir: Path, recipe: Recipe, num_processes: int = 1) -> Path:
    """Train a run, and return its directory."""
    if num_processes == 1:
        train(str(run_dir), recipe)
    else:
        run_distributed(train, num_processes, str(run_dir), recipe)
    directory.keep_artifacts(run_dir, build.build_data(recipe).artifacts)
    Job(run_dir, overrides=(), cwd=str(run_dir)).save(recipe)
    return run_dir
