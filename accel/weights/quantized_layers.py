"""Linear layers of bitsandbytes: made in the place of torch's, filled from weights of any kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel.config.quantization import BnbQuantizationConfig
from accel.logging import get_logger
from accel.machine.errors import CheckpointError, ConfigError, Problem, nearest
from accel.machine.imports import require
from accel.weights.tensors import find_tied_parameters

logger = get_logger(__name__)

WEIGHT = "weight"
_SCALES = "SCB"  # of 8-bit weights, one a row
_FORMAT = "weight_format"  # of 8-bit weights: row-major, the only one that is written now
_STATE = "weight.quant_state."  # of 4-bit weights: how they are packed
_MIN_VERSION = "0.46"
Parts = Mapping[str, torch.Tensor]


def bitsandbytes(needed_for: str) -> Any:
    """Import and return bitsandbytes, or raise a `MissingPackageError` that names the extra."""
    return require("bitsandbytes", needed_for, f"bitsandbytes>={_MIN_VERSION}", "quantized")


def to_quantize(model: nn.Module, config: BnbQuantizationConfig) -> list[str]:
    """Return the full names of the linear layers that a configuration quantizes.

    Raises:
        ConfigError: for a name in it that the model has no submodule for.
    """
    skipped = config.skip_modules
    kept = config.keep_in_fp32_modules or []
    names = [name for name, _ in model.named_modules() if name]
    parts = {part for name in names for part in name.split(".")}
    for field, given in (("skip_modules", skipped or []), ("keep_in_fp32_modules", kept)):
        for name in given:
            if name not in names and name not in parts:
                value, rule = f"{field}: {name!r}", "the model has no such submodule"
                raise ConfigError.of(value, rule, nearest(name, names))
    spared = {*(_heads(model) if skipped is None else skipped), *kept}
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not lies_within(name, spared)
    ]
    if not found:
        logger.warning("No linear modules were found in your model, so nothing is quantized.")
    return found


def lies_within(name: str, modules: Collection[str]) -> bool:
    """Return whether a name is, or lies in, a module that is named fully or by one part."""
    return not {*name.split(".")}.isdisjoint(modules) or any(
        name == module or name.startswith(f"{module}.") for module in modules
    )


def _heads(model: nn.Module) -> Iterator[str]:
    """Yield the modules with tied weights, and the output embeddings or the last layer."""
    for group in find_tied_parameters(model):
        yield from (name.rpartition(".")[0] for name in group)
    embeddings = getattr(model, "get_output_embeddings", None)
    head = embeddings() if callable(embeddings) else None
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    last = layers[-1] if head is None and layers else head
    yield from (name for name, module in model.named_modules() if module is last and name)


# -- one layer -----------------------------------------------------------------------------


def empty_layer(linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Linear:
    """Return a quantized layer of the shape of `linear`, on the meta device."""
    bnb = bitsandbytes("load_and_quantize_model")
    shape = (linear.in_features, linear.out_features, linear.bias is not None)
    layer: nn.Linear
    if config.load_in_8bit:
        threshold = config.llm_int8_threshold
        layer = bnb.nn.Linear8bitLt(
            *shape, has_fp16_weights=False, threshold=threshold, device="meta"
        )
    else:
        layer = bnb.nn.Linear4bit(
            *shape,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            device="meta",
        )
        # On CPUs with AVX512-BF16 bitsandbytes would repack weights at the first evaluation: some
        # shapes fail, results depend on the CPU, and no gradient passes (of an adapter) afterwards.
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment] # no tensor
    if layer.bias is not None:
        layer.bias.requires_grad_(linear.bias.requires_grad)
    return layer.train(linear.training)


def fill(
    name: str,
    layer: nn.Linear,
    parts: Parts,
    device: torch.device,
    config: BnbQuantizationConfig,
) -> None:
    """Give a layer its weight: quantized here, or as a checkpoint has it.

    Args:
        name: its full name, for messages.
        layer: as of `empty_layer`.
        parts: `weight`, and what else belongs to it in a checkpoint of quantized weights.
        device: where to.
        config: how floating weights are quantized.

    Raises:
        CheckpointError: for a weight of another shape, or quantized to other bits.
    """
    weight = parts[WEIGHT]
    state = next((key for key in parts if key.startswith(_STATE)), None)
    if weight.is_floating_point():
        _check_shape(name, weight, layer)
        given = weight.detach().to(config.torch_dtype, copy=True)
        layer.weight = _parameter(layer, given, config).to(device)
    elif config.load_in_8bit and weight.dtype == torch.int8 and _SCALES in parts:
        _check_shape(name, weight, layer)
        given, scales = weight.to(device, copy=True), parts[_SCALES].to(device, copy=True)
        kind: Any = type(layer.weight)
        layer.weight = kind(given, False, has_fp16_weights=False, CB=given, SCB=scales)
    elif config.load_in_4bit and state is not None:
        kind = type(layer.weight)
        rest = {key: part.clone() for key, part in parts.items() if key != WEIGHT}
        layer.weight = kind.from_prequantized(
            weight.clone(), rest, requires_grad=False, device=device, module=layer
        )
    else:
        raise _unfit(name, weight, config)


def _parameter(layer: nn.Linear, weight: torch.Tensor, config: BnbQuantizationConfig) -> Any:
    """Return a weight that a move to a device quantizes."""
    kind: Any = type(layer.weight)
    if config.load_in_8bit:
        return kind(weight, requires_grad=False, has_fp16_weights=False)
    return kind(
        weight,
        requires_grad=False,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        module=layer,
    )


def is_plain(key: str) -> bool:
    """Return whether an entry of a layer is none of its quantized weight: bias, or the format."""
    return key in ("bias", _FORMAT)


def _check_shape(name: str, weight: torch.Tensor, layer: nn.Linear) -> None:
    wanted = (layer.out_features, layer.in_features)
    if weight.shape != wanted:
        value = f"{name}.weight of shape {list(weight.shape)}"
        rule = f"the model has {list(wanted)}"
        raise CheckpointError(Problem(value, rule, "Build the model as it was when it was saved."))


def _unfit(name: str, weight: torch.Tensor, config: BnbQuantizationConfig) -> CheckpointError:
    bits = "8" if config.load_in_8bit else "4"
    value = f"{name}.weight of {str(weight.dtype).removeprefix('torch.')}"
    rule = f"it is neither a floating weight nor one quantized to {bits} bits with its scales"
    remedy = "Give the configuration that it was quantized with, or the original weights."
    return CheckpointError(Problem(value, rule, remedy))
