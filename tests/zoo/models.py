"""Eight models of transformers, tiny and random, and what each is trained and tried on.

Every model computes its own loss, so that a batch holds its labels. Each sample has as many labels
as any other: the mean over the processes' means is that of the whole batch.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WIDTH, VOCABULARY, LENGTH, NUM_LAYERS = 32, 64, 8, 2
UNFROZEN_AT = 3  # the step before which frozen layers are unfrozen
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        build: returns the model, the same on each process.
        batch: returns the batch of a step, by its number and number of samples B.
        prompt: returns what `generate` is given; None: the model generates nothing.
        load: returns the model from a directory that `save_pretrained` wrote.
        has_tp_plan: whether the model says itself how its matrices are split.
        exported: part of the names of the weights that `save_pretrained` writes.
        unfreezes: whether frozen layers are unfrozen before step `UNFROZEN_AT`.
    """

    build: Callable[[], torch.nn.Module]
    batch: Callable[[int, int], Batch]
    prompt: Callable[[], Batch] | None
    load: Callable[[str], torch.nn.Module]
    has_tp_plan: bool = False
    exported: str = ""
    unfreezes: bool = False


def _draw(step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def _causal_batch(step: int, size: int) -> Batch:
    tokens = _draw(step, size, LENGTH)
    return {"input_ids": tokens, "labels": tokens}


def _masked_batch(step: int, size: int) -> Batch:
    tokens = _draw(step, size, LENGTH)
    labels = torch.full_like(tokens, -100)
    labels[:, ::4] = tokens[:, ::4]
    return {"input_ids": tokens.masked_fill(labels != -100, 1), "labels": labels}


def _translation_batch(step: int, size: int) -> Batch:
    tokens = _draw(step, size, LENGTH)
    return {"input_ids": tokens, "labels": tokens.flip(1)}


def _image_batch(step: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(200 + step)
    images = torch.randn(size, 3, 16, 16, generator=generator)
    return {"pixel_values": images, "labels": torch.arange(size) % 5}


def _tokens() -> Batch:
    tokens = _draw(-1, 2, 4)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _build(kind: str, config: str, **fields: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        import transformers

        torch.manual_seed(0)
        model: torch.nn.Module = getattr(transformers, kind)(
            getattr(transformers, config)(**fields)
        )
        return _spread_out(model)

    return build


def _load(kind: str) -> Callable[[str], torch.nn.Module]:
    def load(folder: str) -> torch.nn.Module:
        import transformers

        loaded: torch.nn.Module = getattr(transformers, kind).from_pretrained(
            folder, local_files_only=True
        )
        return loaded

    return load


def _spread_out(model: torch.nn.Module) -> torch.nn.Module:
    """Give matrices weights as large as those of a trained model: rounding then shows in losses."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_llama = _build("LlamaForCausalLM", "LlamaConfig", **LLAMA)


def _adapted() -> torch.nn.Module:
    import peft

    model = _llama()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: torch.nn.Module = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted


def _load_adapted(folder: str) -> torch.nn.Module:
    import peft

    loaded: torch.nn.Module = peft.PeftModel.from_pretrained(_llama(), folder)  # type: ignore[arg-type]
    return loaded


def _frozen() -> torch.nn.Module:
    model = _llama()
    freeze(model, True)
    return model


def freeze(model: torch.nn.Module, frozen: bool) -> None:
    """Freeze the embedding and the first block of a Llama, or unfreeze them."""
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "layers.0." in name:
            parameter.requires_grad_(not frozen)


MODELS: dict[str, Entry] = {
    "gpt2": Entry(
        _build(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=NUM_LAYERS,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        ),
        _causal_batch,
        _tokens,
        _load("GPT2LMHeadModel"),
    ),
    "llama": Entry(_llama, _causal_batch, _tokens, _load("LlamaForCausalLM"), has_tp_plan=True),
    "bert": Entry(
        _build(
            "BertForMaskedLM",
            "BertConfig",
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        _masked_batch,
        None,
        _load("BertForMaskedLM"),
    ),
    "t5": Entry(
        _build(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=2 * WIDTH,
            num_layers=NUM_LAYERS,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            eos_token_id=None,
        ),
        _translation_batch,
        _tokens,
        _load("T5ForConditionalGeneration"),
    ),
    "vit": Entry(
        _build(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            image_size=16,
            patch_size=8,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        _image_batch,
        None,
        _load("ViTForImageClassification"),
    ),
    "mixtral": Entry(
        _build(
            "MixtralForCausalLM",
            "MixtralConfig",
            **LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
        _causal_batch,
        _tokens,
        _load("MixtralForCausalLM"),
        has_tp_plan=True,
    ),
    "lora": Entry(_adapted, _causal_batch, _tokens, _load_adapted, exported="lora"),
    "unfrozen": Entry(
        _frozen,
        _causal_batch,
        _tokens,
        _load("LlamaForCausalLM"),
        has_tp_plan=True,
        unfreezes=True,
    ),
}
