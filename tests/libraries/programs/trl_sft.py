"""trl: `SFTTrainer` on sentences of a vocabulary in memory, with and without LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

from tests.libraries.programs import tiny
from tests.libraries.programs.transformers_trainer import ARGUMENTS, history


def run(options: Mapping[str, Any], folder: Path) -> dict[str, list]:
    """Fine-tune a language model for one epoch and evaluate it."""
    options = dict(options)
    lora = options.pop("lora", False)
    set_seed(31)
    own = {"num_train_epochs": 1, "save_strategy": "epoch", "max_length": 16, "bf16": False}
    given = {**ARGUMENTS, **own, **options}
    adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True) if lora else None
    trained = SFTTrainer(
        model=tiny.language_model(),
        args=SFTConfig(output_dir=str(folder), **given),
        train_dataset=Dataset.from_dict({"text": tiny.sentences(45, seed=3)}),
        eval_dataset=Dataset.from_dict({"text": tiny.sentences(11, seed=4)}),
        processing_class=tiny.tokenizer(),
        peft_config=adapters,
    )
    trained.train()
    result: dict[str, list] = dict(history(trained))
    result["weights"] = [tiny.digest(trained.accelerator.unwrap_model(trained.model))]
    trained.accelerator.wait_for_everyone()
    result["files"] = tiny.files(folder)
    return result
