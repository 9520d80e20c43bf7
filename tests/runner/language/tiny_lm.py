"""A language model of 79 thousand weights on disk, with what trains it. Also a user's package.

Shapes: B samples, T tokens, V = 64 words.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from runner import Callback, Data, Objective, register

V, T = 64, 12


def config() -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=V, max_position_embeddings=64, **sizes, **heads)


def save_base(folder: Path, seed: int = 0) -> Path:
    """Write a base model with weights drawn from a seed; return its folder."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(config()).save_pretrained(folder)
    return folder


@register.model("tiny_lm")
def tiny_lm(
    path: str | None = None,
    dtype: str = "float32",
    checkpointing: bool = False,
    quantization: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Return the model, read from a folder or without weights of its own."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    if path is None:
        model = LlamaForCausalLM(config())
    else:
        more = (
            {}
            if quantization is None
            else {"quantization_config": BitsAndBytesConfig(**quantization)}
        )
        model = LlamaForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **more)
        model.base_path = Path(path)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@register.data("tokens")
def tokens() -> Data:
    """Return rows of T tokens, each the one before plus a step of the row."""
    start, step = torch.arange(72) % V, torch.arange(72) % 5 + 1
    rows = (start[:, None] + step[:, None] * torch.arange(T)) % V
    return Data(TensorDataset(rows[:48]), TensorDataset(rows[48:60]), TensorDataset(rows[60:]))


@register.objective("next_token")
class NextToken(Objective):
    """Mean cross-entropy of the tokens after the first."""

    def losses(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of each sample: [B]."""
        (rows,) = batch
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        return F.cross_entropy(logits.mT, rows[:, 1:], reduction="none").mean(1)

    def predict(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the last token's logits: [B, V]."""
        (rows,) = batch
        return model(input_ids=rows, use_cache=False).logits[:, -1]


@register.callback("kill")
class Kill(Callback):
    """Ends the process after a step that the environment names, as an out-of-memory killer does."""

    def on_step(self, loop: Any) -> None:
        """End it."""
        if str(loop.state.step) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
