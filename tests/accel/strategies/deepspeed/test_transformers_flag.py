"""transformers builds its models in shards under ZeRO-3, and as a whole under anything else.

Holds E5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine.imports import is_available
from accel.state import AcceleratorState
from accel.utils import DeepSpeedPlugin, HfDeepSpeedConfig
from tests.accel.strategies.deepspeed.helpers import largest
from tests.helpers import run_distributed

pytestmark = pytest.mark.skipif(
    not is_available("transformers"), reason="transformers is not installed"
)
AUTO = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
}


def tiny() -> Any:
    """A language model of one layer, built by transformers from a configuration."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        GPT2Config(
            vocab_size=32, n_embd=24, n_layer=1, n_head=2, n_positions=16, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def in_shards(model: torch.nn.Module) -> bool:
    marked = {hasattr(parameter, "ds_id") for parameter in model.parameters()}
    assert len(marked) == 1
    return marked == {True}


def recognises_stage_3() -> None:
    from transformers.integrations import deepspeed as integration

    assert not integration.is_deepspeed_zero3_enabled()
    whole = tiny()
    assert not in_shards(whole)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(AUTO))
    assert integration.is_deepspeed_zero3_enabled()
    told = integration.deepspeed_config()
    assert told["zero_optimization"]["stage"] == 3
    assert told["train_batch_size"] == accelerator.num_processes
    model = tiny()
    assert in_shards(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    width = model.module.config.n_embd
    assert model._config.zero_config.reduce_bucket_size == width * width
    assert model._config.zero_config.param_persistence_threshold == 10 * width
    tokens = torch.arange(8).view(2, 4)
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    accelerator.end_training()
    assert not integration.is_deepspeed_zero3_enabled()
    assert not in_shards(tiny())


def follows_the_selected_plugin() -> None:
    from transformers.integrations import deepspeed as integration

    plugins = {"two": DeepSpeedPlugin(zero_stage=2), "three": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    state = AcceleratorState()
    assert not integration.is_deepspeed_zero3_enabled()
    state.select_deepspeed_plugin("three")
    assert integration.is_deepspeed_zero3_enabled()
    with plugins["three"].zero3_init_context_manager(enable=False):
        assert not in_shards(tiny())
    assert in_shards(tiny())
    plugins["two"].select()
    assert not integration.is_deepspeed_zero3_enabled()
    plugins["three"].select()
    own = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # another's stays
    integration.set_hf_deepspeed_config(own)
    accelerator.end_training()
    assert integration.deepspeed_config() is own.config
    integration.unset_hf_deepspeed_config()


def loads_in_shards(folder: str, precision: str) -> None:
    """`from_pretrained` under stage 3, with tied weights, and an export that it reads again."""
    from transformers import AutoModelForCausalLM

    plugin = DeepSpeedPlugin(zero_stage=3)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision=precision)
    with plugin.zero3_init_context_manager(enable=False):
        whole = tiny()
    if accelerator.is_main_process:
        whole.save_pretrained(f"{folder}/first")
    accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/first", local_files_only=True)
    assert in_shards(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    loaded = accelerator.get_state_dict(model)
    tolerance = 0.0 if precision == "no" else 1e-2
    assert largest(loaded, whole.state_dict()) <= tolerance
    tokens = torch.arange(8).view(2, 4)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    state = accelerator.get_state_dict(model)
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    accelerator.unwrap_model(model).save_pretrained(  # takes tied weights out of what it is given
        f"{folder}/second", state_dict=dict(state), is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    with plugin.zero3_init_context_manager(enable=False):
        again = AutoModelForCausalLM.from_pretrained(f"{folder}/second", local_files_only=True)
    # It comes back in the format of the model that it was saved from.
    assert again.dtype == {"no": torch.float32, "bf16": torch.bfloat16}[precision]
    rounded = {name: value.to(again.dtype) for name, value in state.items()}
    assert largest(again.state_dict(), rounded) == 0.0
    accelerator.end_training()


@pytest.mark.slow  # the step and the export are those of any model
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_saved_model_is_loaded_in_shards(tmp_path: Path, precision: str) -> None:
    run_distributed(loads_in_shards, 2, str(tmp_path), precision)


def test_models_of_transformers_are_sharded_while_they_are_built() -> None:
    run_distributed(recognises_stage_3, 2)


def test_the_selected_plugin_decides() -> None:
    run_distributed(follows_the_selected_plugin, 1)
