"""peft: LoRA adapters of a tiny classifier, trained by a loop of its own with an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import set_seed

from tests.libraries.programs import tiny


def run(options: Mapping[str, Any], folder: Path) -> dict[str, list]:
    """Train adapters for three epochs, save them, load them again and compare the outputs."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=options.get("mixed_precision", "no"),
        gradient_accumulation_steps=options.get("gradient_accumulation_steps", 1),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(21)
    config = LoraConfig(
        task_type="SEQ_CLS", r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = get_peft_model(tiny.classifier(), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(tiny.Sequences(30, seed=3), batch_size=4, collate_fn=tiny.pad)
    held_out = DataLoader(tiny.Sequences(10, seed=4), batch_size=4, collate_fn=tiny.pad)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    result: dict[str, list] = {"loss": [], "outputs": []}
    for _ in range(3):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            result["loss"].append(float(accelerator.gather(loss.detach()).mean()))
    model.eval()
    with torch.no_grad():
        for batch in held_out:
            logits = accelerator.gather_for_metrics(model(**batch).logits)
            result["outputs"] += logits.double().flatten().tolist()
    plain = accelerator.unwrap_model(model)
    result["weights"] = [tiny.digest(get_peft_model_state_dict(plain))]
    if accelerator.is_main_process:
        plain.save_pretrained(folder / "adapter")
    accelerator.wait_for_everyone()
    again = PeftModel.from_pretrained(tiny.classifier(), folder / "adapter")
    result["reloaded"] = [tiny.digest(get_peft_model_state_dict(again))]
    result["files"] = tiny.files(folder)
    accelerator.end_training()
    return result
