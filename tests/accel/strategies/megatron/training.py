"""One small language model, trained by a plain loop and under Megatron: they must agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.config.megatron import MegatronLMPlugin
from tests.accel.strategies.megatron.cuda_is_cpu import cuda_is_cpu

TOKENS, STEPS, MICRO_BATCHES, BATCH, LENGTH = 64, 4, 2, 4, 16
MAX_NORM = 0.5
CLOSE = 1e-6


def build_model(kind: str = "llama", dropout: float = 0.0) -> torch.nn.Module:
    """Return a model of transformers, the same at each call."""
    import transformers

    torch.manual_seed(0)
    shared: dict[str, Any] = {"vocab_size": TOKENS, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        drops = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), dropout)
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=32, **shared, **drops
        )
        return transformers.GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    if kind == "mistral":
        config = transformers.MistralConfig(sliding_window=5, **shared, **sizes)
        return transformers.MistralForCausalLM(config)
    tied = kind == "tied"
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(tie_word_embeddings=tied, **shared, **sizes)
    )


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with another group for what has one dim."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def data(steps: int = STEPS) -> torch.Tensor:
    """Return tokens [steps, micro-batches, samples, tokens]."""
    shape = (steps, MICRO_BATCHES, BATCH, LENGTH)
    return torch.randint(TOKENS, shape, generator=torch.Generator().manual_seed(1))


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def batch_of(tokens: torch.Tensor, padded: bool = False) -> dict[str, torch.Tensor]:
    """Return a batch; `padded`: the last tokens of every other sample are padding."""
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if padded:
        mask = torch.ones_like(tokens)
        mask[::2, -4:] = 0
        batch["labels"][mask == 0] = -100
        batch["attention_mask"] = mask
    return batch


Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]


def plain(kind: str = "llama", padded: bool = False) -> Trained:
    """Train without accel; return losses, norms before clipping, and weights."""
    model = build_model(kind)
    optimizer = build_optimizer(model)
    losses, norms = [], []
    for step in data():
        total = 0.0
        for tokens in step:
            loss = loss_of(model, batch_of(tokens, padded))
            (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, {n: v.detach().clone() for n, v in model.state_dict().items()}


@contextlib.contextmanager
def started(
    fields: dict[str, Any] | None, engine: str = "megatron", **options: Any
) -> Iterator[Accelerator]:
    """Yield an `Accelerator` under a plugin, with "cuda" answered by the CPU for Megatron."""
    options["gradient_accumulation_steps"] = MICRO_BATCHES
    if engine == "megatron":
        options["megatron_lm_plugin"] = MegatronLMPlugin(**(fields or {}))
    elif engine == "fsdp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    with cuda_is_cpu() if engine == "megatron" else contextlib.nullcontext():
        accelerator = Accelerator(cpu=True, **options)
        yield accelerator
        accelerator.end_training()


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    steps: torch.Tensor,
    padded: bool = False,
    data_rank: int | None = None,
    build: Callable[..., dict[str, torch.Tensor]] = batch_of,
) -> tuple[list[float], list[float]]:
    """Train over `steps`; return the losses over all data, and the norms before clipping.

    `build` returns a batch of tokens, padded or not.
    """
    dims = accelerator.parallel_dims
    rank = dims.dp_rank if data_rank is None else data_rank
    losses, norms = [], []
    for step in steps:
        mine = [build(tokens.chunk(dims.dp_size)[rank], padded) for tokens in step]
        found = accelerator.forward_backward(model, mine, loss_of)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(torch.stack(found).mean(), "mean")))
    return losses, norms
