"""Building models of megatron-core from models of transformers: GPT with their weights by name.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/index.html
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from accel.machine.errors import ConfigError, Problems
from accel.strategies.megatron.steps import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    T5TrainStep,
)

if TYPE_CHECKING:
    from accel.config.megatron import MegatronLMPlugin

# Weights by megatron-core's names, and the plain ones that each consists of; then those of a layer.
LLAMA_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
LLAMA: Mapping[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{one}_proj.weight" for one in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
GPT2_MODEL = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
}
GPT2: Mapping[str, tuple[str, ...]] = {
    f"{ours}{kind}": (f"{plain}.{kind}",)
    for ours, plain in {
        "self_attention.linear_qkv.layer_norm_": "ln_1",
        "self_attention.linear_qkv.": "attn.c_attn",
        "self_attention.linear_proj.": "attn.c_proj",
        "mlp.linear_fc1.layer_norm_": "ln_2",
        "mlp.linear_fc1.": "mlp.c_fc",
        "mlp.linear_fc2.": "mlp.c_proj",
    }.items()
    for kind in ("weight", "bias")
}
INSTEAD = "Use FSDP instead."
# Fields of TransformerConfig for other layers, numbers and ranks than are built here.
UNUSED = {
    *("normalization", "add_bias_linear", "num_moe_experts", "fp8", "fp4", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "use_cpu_initialization"),
}
GPT = ("LlamaForCausalLM", "MistralForCausalLM", "GPT2LMHeadModel")
BERT = ("MegatronBertForPreTraining", "MegatronBertForMaskedLM")
T5 = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")


@final
class ScaledDotProductAttention(MegatronModule):
    """Core attention by torch's `scaled_dot_product_attention`; heads are those of this rank.

    Shapes: T tokens, B samples, H heads, G groups of keys, D size of a head.
    """

    def __init__(self, config: TransformerConfig, *_: object, **__: object) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        """Return attention [T, B, H * D] of query [T, B, H, D] to key and value [T, B, G, D].

        `attention_mask` [B, 1, T, T] is true for what is hidden; None: each token sees those
        before it.
        """
        dropout = self.config.attention_dropout if self.training else 0.0
        draws = tensor_parallel.get_cuda_rng_tracker().fork if dropout else contextlib.nullcontext
        with draws():  # other heads on each rank: other draws
            attended = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=None if attention_mask is None else ~attention_mask,
                dropout_p=dropout,
                is_causal=attention_mask is None,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return attended.permute(2, 0, 1, 3).flatten(2)


class Norm:
    """Torch's layer norm of a configuration, marked for sequence parallelism.

    Megatron's own wrapper of it refuses sequence parallelism, whose gradients need the mark alone.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, **kwargs: Any) -> Any:
        """Return the module."""
        kind = getattr(torch.nn, config.normalization)  # LayerNorm or RMSNorm
        built = kind(hidden_size, kwargs["eps"], device=torch.cuda.current_device())
        for parameter in built.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return built


# -- weights -------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Weight:
    """A weight of megatron-core, and the plain weights that it consists of.

    Attributes:
        names: of the plain weights, in their order along dim 0.
        is_transposed: whether the plain matrices are [in, out], as GPT-2's.
        groups: of query heads: queries, keys and values are interleaved by group; 0: it is not
            their projection.
        size: of a head.
    """

    names: tuple[str, ...]
    is_transposed: bool = False
    groups: int = 0
    size: int = 0

    def join(self, plain: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weight of megatron-core from the plain ones."""
        parts = [self._turned(part) for part in plain]
        if not self.groups:
            return torch.cat(parts)
        parts = parts if len(parts) == 3 else list(parts[0].chunk(3))  # GPT-2 keeps them in one
        grouped = [part.unflatten(0, (self.groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return the plain weights from that of megatron-core."""
        parts = list(full.chunk(len(self.names)))
        if self.groups:
            grouped = full.unflatten(0, (self.groups, -1))
            sizes = [grouped.shape[1] - 2 * self.size, self.size, self.size]
            parts = [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
            parts = parts if len(self.names) == 3 else [torch.cat(parts)]
        return [self._turned(part).contiguous() for part in parts]

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if self.is_transposed and tensor.dim() == 2 else tensor


Weights = Mapping[str, Weight]  # by megatron-core's name


def weights_of(config: Any) -> Weights:
    """Return how the weights of megatron-core's model consist of those of a model."""
    is_gpt2, groups = config.model_type == "gpt2", config.num_attention_heads
    model, layer, layers = GPT2_MODEL, GPT2, "transformer.h"
    if not is_gpt2:
        model, layer, layers = LLAMA_MODEL, LLAMA, "model.layers"
        groups = config.num_key_value_heads
    found = {ours: Weight((plain,)) for ours, plain in model.items()}
    for index in range(config.num_hidden_layers):
        for ours, names in layer.items():
            found[f"decoder.layers.{index}.{ours}"] = Weight(
                tuple(f"{layers}.{index}.{name}" for name in names),
                is_gpt2,
                groups if ours.endswith(("linear_qkv.weight", "linear_qkv.bias")) else 0,
                _head_size(config),
            )
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = Weight(("lm_head.weight",))
    return found


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


# -- the model -----------------------------------------------------------------------------


def build_model(
    model: torch.nn.Module, plugin: MegatronLMPlugin, dtype: torch.dtype, seed: int
) -> MegatronModule:
    """Return this rank's shard of a model of transformers.

    GPT has no weights yet; those of BERT and T5 are drawn from `seed`, the same for each tp_degree.

    Raise `ConfigError` for a model that megatron-core would compute otherwise.
    """
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if name not in GPT + BERT + T5:
        rule = f"it rebuilds {', '.join(GPT + BERT + T5)}, and takes modules of megatron-core"
        raise ConfigError.of(f"prepare: {name} under Megatron", rule, "Give one of these.")
    sizes = _sizes_of_t5(config) if name in T5 else _sizes(config)
    _check(name, config, sizes, plugin)
    own = {**sizes, **_distributed(plugin, dtype)}
    further = plugin.other_megatron_args or {}
    known = {one.name for one in dataclasses.fields(TransformerConfig)} - own.keys() - UNUSED
    if odd := sorted(set(further) - known):
        rule = "it takes fields of TransformerConfig that model and plugin leave open"
        raise ConfigError.of(f"other_megatron_args: {', '.join(odd)}", rule, "Leave them out.")
    if name in GPT:
        _check_gpt(model, config)
    arguments = {**own, **further, "use_cpu_initialization": name not in GPT}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return _build(name, config, TransformerConfig(**arguments), plugin)


def _layer(spec: Any) -> Any:
    """Return the spec of a layer with torch's norms and attention."""
    spec = copy.deepcopy(spec)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attentions = [parts.self_attention]
    if hasattr(parts.cross_attention, "submodules"):
        parts.pre_cross_attn_layernorm = Norm
        attentions.append(parts.cross_attention)
    for attention in attentions:
        attention.submodules.core_attention = ScaledDotProductAttention
    return spec


def _block(spec: Any, core: TransformerConfig) -> TransformerBlockSubmodules:
    count = core.num_layers // core.pipeline_model_parallel_size
    return TransformerBlockSubmodules([_layer(spec)] * count, Norm)


@final
class Bert(BertModel):
    """BERT whose attention mask is for torch's attention, of which each token sees some."""

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        return "b1ss"

    def bert_extended_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return which tokens are hidden from which, [B, 1, T, T], from [B, T], 0 for padding."""
        length = attention_mask.shape[1]
        return (attention_mask == 0)[:, None, None].expand(-1, 1, length, -1)


def _build(
    name: str, config: Any, core: TransformerConfig, plugin: MegatronLMPlugin
) -> MegatronModule:
    is_tied = name not in GPT or config.tie_word_embeddings
    shared = {"vocab_size": config.vocab_size, "share_embeddings_and_output_weights": is_tied}
    if name in T5:
        encoder = dataclasses.replace(core, num_layers=config.num_layers)
        blocks = (
            _block(encoder_model_with_local_spec(), encoder),
            _block(decoder_model_with_local_spec(), core),
        )
        length = plugin.seq_length or getattr(config, "n_positions", 512)
        return T5Model(core, encoder, *blocks, max_sequence_length=length, **shared)
    shared |= {
        "max_sequence_length": config.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if name in BERT:
        types, layer = (2 if name == BERT[0] else 0), _layer(bert_layer_local_spec)
        return Bert(core, types, layer, add_binary_head=name == BERT[0], **shared)
    return GPTModel(
        core,
        _block(get_gpt_layer_local_spec(normalization=core.normalization), core),
        position_embedding_type="learned_absolute" if config.model_type == "gpt2" else "rope",
        rotary_base=(getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000),
        **shared,
    )


def step_of(model: torch.nn.Module, core: Any) -> tuple[type[AbstractTrainStep], SimpleNamespace]:
    """Return the train step of a kind of model, and its arguments."""
    name, config = type(model).__name__, getattr(model, "config", None)
    kind = BertTrainStep if name in BERT else T5TrainStep if name in T5 else GPTTrainStep
    names = ("sliding_window", "decoder_start_token_id", "pad_token_id", "num_labels")
    own = {name: getattr(config, name, None) for name in names}
    flags = {"pretraining_flag": True, "bert_binary_head": name == BERT[0]}
    return kind, SimpleNamespace(**{**vars(core.config), **own, **flags})


def _check(name: str, config: Any, sizes: dict[str, Any], plugin: MegatronLMPlugin) -> None:
    """Refuse sizes that the degrees of a plugin do not divide."""
    problems, heads = Problems(), sizes["num_attention_heads"]
    for what, size, degree in (
        ("attention heads", heads, "tp_degree"),
        ("key-value heads", sizes.get("num_query_groups", heads), "tp_degree"),
        ("features of an MLP", sizes["ffn_hidden_size"], "tp_degree"),
        ("tokens of a vocabulary", config.vocab_size, "tp_degree"),
        ("layers", sizes["num_layers"], "pp_degree"),
    ):
        if size % (parts := getattr(plugin, degree)):
            pads = f"model.resize_token_embeddings(pad_to_multiple_of={parts})"
            remedy = f"Choose another {degree}; a vocabulary grows by {pads}."
            problems.add(f"{name}: {size} {what} with {degree}={parts}", "each has as many", remedy)
    if name in T5 and plugin.sizes[1] > 1:
        rule = "megatron-core has encoder and decoder on each stage"
        problems.add(f"{name} with pp_degree={plugin.pp_degree}", rule, "Give tp_degree instead.")
    if name not in GPT and plugin.sequence_parallelism:
        rule = "the norms of its heads are not divided"
        problems.add(f"{name} with sequence_parallelism", rule, "Leave it out.")
    problems.raise_if()


def _check_gpt(model: torch.nn.Module, config: Any) -> None:
    """Refuse weights and options that megatron-core's GPT has not."""
    name, problems = type(model).__name__, Problems()
    known = {one for weight in weights_of(config).values() for one in weight.names}
    if further := {parameter for parameter, _ in model.named_parameters()} - known:
        shown = f"{name} with {', '.join(sorted(further)[:3])} under Megatron"
        problems.add(shown, "megatron-core's layers have no such weights here", INSTEAD)
    rope, by_index = (
        getattr(config, "rope_parameters", None) or {},
        "scale_attn_by_inverse_layer_idx",
    )
    for option, found, only in (
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("embd_pdrop", getattr(config, "embd_pdrop", 0), getattr(config, "resid_pdrop", 0)),
        ("scale_attn_weights", getattr(config, "scale_attn_weights", True), True),
        (by_index, getattr(config, by_index, False), False),
    ):
        if found != only:
            shown = f"{name}: {option}={found} under Megatron"
            problems.add(shown, f"it is {only} here", INSTEAD)
    problems.raise_if()


def _sizes(config: Any) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that are a model's own."""
    shared = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": _head_size(config),
    }
    if config.model_type == "gpt2":
        return shared | {
            "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
            "layernorm_epsilon": config.layer_norm_epsilon,
            "activation_func": _activation(config.activation_function),
            "attention_dropout": config.attn_pdrop,
            "hidden_dropout": config.resid_pdrop,
        }
    if config.model_type == "megatron-bert":
        return shared | {
            "ffn_hidden_size": config.intermediate_size,
            "layernorm_epsilon": config.layer_norm_eps,
            "activation_func": _activation(config.hidden_act),
            "attention_dropout": config.attention_probs_dropout_prob,
            "hidden_dropout": config.hidden_dropout_prob,
        }
    return shared | {
        "ffn_hidden_size": config.intermediate_size,
        "num_query_groups": config.num_key_value_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "activation_func": _activation(config.hidden_act),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": 0.0,
    }


def _sizes_of_t5(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_decoder_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.d_kv,
        "ffn_hidden_size": config.d_ff,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": _activation(config.dense_act_fn),
        "gated_linear_unit": config.is_gated_act,
        "attention_dropout": config.dropout_rate,
        "hidden_dropout": config.dropout_rate,
    }


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN[name].forward  # a module of its own would need a sharded state


def _distributed(plugin: MegatronLMPlugin, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that say how a model is distributed."""
    granularity = "selective" if plugin.recompute_activations else plugin.recompute_granularity
    is_full = granularity == "full"
    given = {
        "attention_dropout": plugin.attention_dropout,
        "hidden_dropout": plugin.hidden_dropout,
        "recompute_granularity": granularity,
        "recompute_method": plugin.recompute_method or ("uniform" if is_full else None),
        "recompute_num_layers": plugin.recompute_num_layers or (1 if is_full else None),
    }
    fusions = ("gradient_accumulation", "bias_dropout", "masked_softmax", "bias_activation")
    return {
        **{name: value for name, value in given.items() if value is not None},
        **{f"{name}_fusion": False for name in fusions},  # kernels of Apex
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "sequence_parallel": plugin.sequence_parallelism,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "variable_seq_lengths": plugin.sizes[1] > 1,
        "moe_token_dispatcher_type": "alltoall",  # which the former requires
    }
