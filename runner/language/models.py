"""Models of Hugging Face's transformers, and the cross-entropy of their tokens in chunks.

Shapes: B rows of the batch of one process, T tokens of a row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel.machine.errors import ConfigError, Problems, nearest, text_of
from accel.machine.imports import is_available
from accel.precision.wrapping import own_module
from accel.weights.tensors import as_dtype
from runner.language.samples import IGNORED

CHUNK = 2**26  # logits that exist at once: 256 MiB in fp32
# Kernels that keep samples apart in a batch of one row only.
# Source: https://huggingface.co/docs/transformers/main_classes/data_collator
ONE_ROW = "flash"
# What the output embedding returns beside nats and hits, to see whether the model changes it.
MARK = 3.0
# The factory of transformers for each kind of model.
AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQUENCE_CLASSIFICATION": "AutoModelForSequenceClassification",
}

# -- factories ---------------------------------------------------------------------------------


def hf_causal_lm(
    path: str | None = None,
    config: Mapping[str, object] | None = None,
    dtype: str | None = None,
    attn_implementation: str | None = None,
    gradient_checkpointing: bool = False,
    quantization: Mapping[str, object] | None = None,
) -> nn.Module:
    """Return a causal language model of transformers.

    Its forward pass also takes `targets` [B, T] (the token after each position, -100: none) and
    then returns ``{"nats": [B, T], "hits": [B, T]}``, the cross-entropy and whether the likeliest
    token is the target. Logits of all positions never exist then. Code of a model's repository is
    never run.

    Args:
        path: folder that `save_pretrained` wrote, or the model's name on the hub.
        config: instead of a path, for a model with new weights: `model_type`, and fields of that
            type's configuration.
        dtype: of the weights, such as "bfloat16"; "auto": as in the files; None: float32, which
            mixed precision computes with in bf16.
        attn_implementation: "sdpa", "eager", "flex_attention", "flash_attention_2" …; None: as
            transformers chooses.
        gradient_checkpointing: whether the backward pass recomputes activations, layer by layer.
        quantization: fields of transformers' BitsAndBytesConfig, such as `load_in_4bit`; for
            `path`.

    Raises:
        ConfigError: if there is no such model, or a field is unknown.
    """
    how = (dtype, attn_implementation, quantization, gradient_checkpointing)
    return _give_targets(_build("CAUSAL_LM", path, config, {}, *how))


def hf_sequence_classification(
    path: str | None = None,
    config: Mapping[str, object] | None = None,
    num_labels: int | None = None,
    pad_token_id: int | None = None,
    dtype: str | None = None,
    attn_implementation: str | None = None,
    gradient_checkpointing: bool = False,
    quantization: Mapping[str, object] | None = None,
) -> nn.Module:
    """Return a model of transformers that classifies sequences: `logits` [B, num_labels].

    Args:
        path: as of `hf_causal_lm`. A new head is drawn where the files have none of that size.
        config: as of `hf_causal_lm`.
        num_labels: number of classes; None: as the configuration says.
        pad_token_id: token that fills up rows; None: as the configuration says. A decoder needs it
            to find the last token of each row.
        dtype: as of `hf_causal_lm`.
        attn_implementation: as of `hf_causal_lm`.
        gradient_checkpointing: as of `hf_causal_lm`.
        quantization: as of `hf_causal_lm`.

    Raises:
        ConfigError: as `hf_causal_lm`.
    """
    given = {"num_labels": num_labels, "pad_token_id": pad_token_id}
    changes = {name: value for name, value in given.items() if value is not None}
    how = (dtype, attn_implementation, quantization, gradient_checkpointing)
    model: nn.Module = _build("SEQUENCE_CLASSIFICATION", path, config, changes, *how)
    return model


def _build(
    kind: str,
    path: str | None,
    fields: Mapping[str, object] | None,
    changes: Mapping[str, object],
    dtype: str | None,
    attention: str | None,
    quantization: Mapping[str, object] | None,
    gradient_checkpointing: bool,
) -> Any:
    """Return a model of a kind, from files or with new weights; `base_path` tells which files."""
    if not is_available("transformers"):
        rule, remedy = "the package transformers is required", "Run pip install 'accel-runner[hf]'."
        raise ConfigError.of("model=hf_…", rule, remedy)
    import transformers

    if bool(path) == bool(fields):
        given = "neither model.path nor model.config" if not path else "model.path and .config"
        rule = "weights are read from files, or drawn for a configuration"
        remedy = "Give one of model.path=DIR and model.config.model_type=llama; the other is null."
        raise ConfigError.of(given, rule, remedy)
    if quantization and not path:
        rule, remedy = "trained weights are quantized, new ones are not", "Give model.path=DIR."
        raise ConfigError.of(f"model.quantization={dict(quantization)}", rule, remedy)
    config = _read_config(path, changes) if path else _new_config({**(fields or {}), **changes})
    known = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING")
    if type(config) not in known:
        rule = f"transformers has no model for {kind.lower().replace('_', ' ')} of that type"
        names = {one.model_type for one in known}
        raise ConfigError.of(
            f"model_type={config.model_type}", rule, nearest(config.model_type, names)
        )
    if kind == "CAUSAL_LM":
        _require_decoder(config, transformers.MODEL_FOR_MASKED_LM_MAPPING)
    as_given, auto = _dtype(dtype, config), getattr(transformers, AUTO[kind])
    # Weights that a context puts on the meta device come from elsewhere: no file is read for them.
    if not path or nn.ParameterList([torch.empty(0)])[0].is_meta:
        config.dtype = as_given
        # Drawn whole and in fp32, so that a seed gives the same weights under every strategy. A
        # classifier's class cannot: where transformers partitions weights, it does so inside.
        if kind == "CAUSAL_LM":
            model = known[type(config)](config)
        else:
            model = auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(as_given)
    else:
        more = {"quantization_config": _quantization(quantization)} if quantization else {}
        model = auto.from_pretrained(path, config=config, dtype=as_given, **more)
    if attention is not None:
        try:
            model.set_attn_implementation(attention)
        except (ImportError, ValueError) as error:
            value, rule = f"model.attn_implementation={attention}", str(error).rstrip(".")
            raise ConfigError.of(value, rule, "Choose sdpa or eager, or install it.") from error
    model.base_path = _folder(path) if path else None
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # the newer name
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def _require_decoder(config: Any, masked: Any) -> None:
    """Refuse an encoder, which sees the tokens that it is to predict."""
    is_encoder = type(config) in masked or config.model_type == "bert-generation"
    if is_encoder and not (config.is_encoder_decoder or getattr(config, "is_decoder", True)):
        rule = "each token sees those after it, which a causal model is to predict"
        remedy = "Set model.config.is_decoder=true (is_decoder in the config.json of model.path), "
        remedy += "or choose a decoder such as llama."
        raise ConfigError.of(f"model_type={config.model_type} with is_decoder=false", rule, remedy)


def _dtype(name: str | None, config: Any) -> torch.dtype:
    if name == "auto":
        return config.dtype or torch.float32
    return as_dtype(name or "float32")


def _new_config(given: Mapping[str, object]) -> Any:
    """Return a configuration with the given fields, each of which it knows."""
    import transformers

    fields = dict(given)
    kind, known = str(fields.pop("model_type", None)), transformers.CONFIG_MAPPING.keys()
    if kind not in known:
        rule = "transformers has no model of that type"
        raise ConfigError.of(f"model.config.model_type={kind}", rule, nearest(kind, known))
    make: Any = transformers.CONFIG_MAPPING[kind]
    default = make()
    problems = Problems()
    for name, value in fields.items():
        if not hasattr(default, name):
            rule = f"a configuration of {kind} has no such field"
            problems.add(f"model.config.{name}={value}", rule, nearest(name, vars(default)))
    problems.raise_if()
    try:
        return make(**fields)
    except Exception as error:  # it checks types, and whether sizes fit together
        rule = " ".join(text_of(error).split())
        raise ConfigError.of(f"model.config={given}", rule, "Correct it.") from error


def _read_config(path: str, changes: Mapping[str, object]) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(path, **changes)
    except (OSError, ValueError) as error:
        rule = "no folder with a model has that name, and the hub gives none either"
        if Path(path).is_dir():
            rule = f"the folder has no model that transformers reads ({text_of(error)})"
        remedy = "Give a folder that save_pretrained wrote, or load the model before: hf download …"
        raise ConfigError.of(f"model.path={path}", " ".join(rule.split()), remedy) from error


def _folder(path: str) -> Path:
    """Return the local folder of a model that was loaded from a folder or from the hub."""
    if Path(path).is_dir():
        return Path(path).resolve()
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(path, local_files_only=True))


def _quantization(fields: Mapping[str, object]) -> Any:
    import transformers

    known = inspect.signature(transformers.BitsAndBytesConfig).parameters
    problems = Problems()
    for name, value in fields.items():
        if name not in known:
            rule = "BitsAndBytesConfig has no such field"
            problems.add(f"model.quantization.{name}={value}", rule, nearest(name, known))
    problems.raise_if()
    return transformers.BitsAndBytesConfig(**fields)


# -- what a model has room for -------------------------------------------------------------------


def require_fit(model: nn.Module, largest: int, context: int = 0) -> None:
    """Refuse tokens or positions that a model does not have: a device would only tell of an index.

    Args:
        model: prepared or not; of one that is not of transformers nothing is known.
        largest: the largest token of the data.
        context: the most tokens of a row.

    Raises:
        ConfigError: naming the token or the context.
    """
    find = getattr(own_module(model), "get_input_embeddings", lambda: None)
    layer = find()  # an adapter may wrap it
    known = getattr(getattr(layer, "base_layer", layer), "num_embeddings", math.inf)
    if largest >= known:
        rule = f"the model has {known} tokens: the data's tokenizer is that of another"
        remedy = (
            "Give data.tokenizer=DIR of the model, or model.config.vocab_size=${facts:vocab_size}."
        )
        raise ConfigError.of(f"token {largest} of the data", rule, remedy)
    if context > (most := num_positions(model)):
        rule = f"the model has {most} positions"
        raise ConfigError.of(f"data.context={context}", rule, f"Set data.context={most}.")


def num_positions(model: nn.Module) -> float:
    """Return how many positions a model of transformers has; infinity: it does not say."""
    config: Any = getattr(own_module(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else math.inf


# -- cross-entropy in chunks -------------------------------------------------------------------


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return nats and hits of each target, and `MARK`: [..., 3] of logits [..., V]."""
    flat, wanted = logits.flatten(0, -2), targets.flatten()
    nats = F.cross_entropy(flat.float(), wanted, ignore_index=IGNORED, reduction="none")
    hits = (flat.argmax(dim=-1) == wanted).float()
    values = torch.stack((nats, hits, torch.full_like(nats, MARK)), dim=-1)
    return values.view(*targets.shape, 3)


class _OfFrozen(torch.autograd.Function):
    """Losses of a chunk by a frozen output embedding, as beside adapters.

    Their gradient is computed at once, so that logits are not computed again for it. Nats of a
    token depend on its own hidden state only: what comes back for each scales its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        with torch.enable_grad():
            part = hidden.detach().requires_grad_()
            values = compute(part, targets)
            (gradient,) = torch.autograd.grad(values[..., 0].sum(), part)
        ctx.save_for_backward(gradient)
        return values.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[..., :1].to(gradient.dtype), None, None


def _hand_targets(head: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Add `targets` to a call of an output embedding, so that a recomputed call has them, too."""
    return args, kwargs if head.targets is None else {**kwargs, "targets": head.targets}


def _losses_in_chunks(head: Any, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
    """Be the forward pass of an output embedding: [B, T, 3] instead of logits if it has targets.

    It is computed here because every strategy has the weight gathered here, and nowhere else.
    """
    own = functools.partial(type(head).forward, head)
    if targets is None:
        return own(hidden)
    is_dtensor = hasattr(hidden, "full_tensor")  # where the vocabulary is sharded

    def compute(part: Tensor, wanted: Tensor) -> Tensor:
        logits = own(part)
        logits = logits.full_tensor() if is_dtensor else logits
        if (bound := head.bound) is not None:
            logits = torch.tanh(logits / bound) * bound
        return token_losses(logits, wanted)

    parts = hidden.flatten(0, 1).split(head.chunk)
    wanted = targets.flatten().split(head.chunk)
    if len(parts) == 1 or not torch.is_grad_enabled():
        values = [compute(*pair) for pair in zip(parts, wanted, strict=True)]
    elif not is_dtensor and not any(weight.requires_grad for weight in head.parameters()):
        values = [_OfFrozen.apply(*pair, compute) for pair in zip(parts, wanted, strict=True)]
    else:
        values = [
            checkpoint(compute, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in zip(parts, wanted, strict=True)
        ]
    result = torch.cat(values).view(*targets.shape, 3)
    if is_dtensor:  # the embedding's own hook expects what its forward pass returns
        same: Any = hidden
        return type(same).from_local(result, same.device_mesh, same.placements, run_check=False)
    return result


def _taking_targets(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's forward pass that also takes `targets` [B, T], and then returns losses."""

    @functools.wraps(forward)
    def with_targets(self: Any, *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return forward(self, *args, **kwargs)
        shape = targets.shape
        if "position_ids" in kwargs and ONE_ROW in self.config._attn_implementation:
            kwargs |= {name: kwargs[name].view(1, -1) for name in ("input_ids", "position_ids")}
            targets = targets.view(1, -1)
        values = _whole_or_chunks(self, functools.partial(forward, self, *args, **kwargs), targets)
        values = values.view(*shape, 3)
        return {"nats": values[..., 0], "hits": values[..., 1]}

    return with_targets


def _whole_or_chunks(model: Any, forward: Callable[[], Any], targets: Tensor) -> Tensor:
    """Return nats and hits, in chunks where the output embedding's logits are the model's."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    if model.changes_logits or "chunk" not in head.__dict__:  # as where an adapter wraps it
        return token_losses(forward().logits, targets)
    head.targets = targets
    if head.bound is not None:
        config.final_logit_softcapping = None
    try:
        values: Tensor = forward().logits
    finally:
        head.targets = None
        if head.bound is not None:
            config.final_logit_softcapping = head.bound
    if model.changes_logits is None:
        # Some models scale their logits, which nats must not go through.
        model.changes_logits = bool((values[..., 2] != MARK).any())
    return _whole_or_chunks(model, forward, targets) if model.changes_logits else values


def _give_targets(model: Any) -> nn.Module:
    """Let the forward pass of a model take `targets`.

    Methods are bound to the instances, so that deep copies call their own.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    if head is not None:
        head.chunk, head.targets = max(1, CHUNK // config.vocab_size), None
        head.bound = getattr(config, "final_logit_softcapping", None)
        head.register_forward_pre_hook(_hand_targets, with_kwargs=True)
        head.forward = types.MethodType(_losses_in_chunks, head)
    model.takes_targets, model.changes_logits = True, None if head is not None else True
    model.forward = types.MethodType(_taking_targets(type(model).forward), model)
    return model
