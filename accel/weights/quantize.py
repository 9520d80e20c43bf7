"""Load a model with linear layers of 8 or 4 bits: `load_and_quantize_model`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os import fspath
from typing import Any

import torch
from torch import nn

from accel.config.quantization import BnbQuantizationConfig
from accel.logging import get_logger
from accel.machine.device import default_device_type
from accel.machine.enums import CustomDtype
from accel.machine.errors import CheckpointError, ConfigError, Problem
from accel.machine.imports import require
from accel.weights import files
from accel.weights.device_map import (
    ELSEWHERE,
    DeviceMap,
    MaxMemory,
    check_device_map,
    lies_within,
    unknown_modules,
)
from accel.weights.dispatch import PathLike, dispatch_model
from accel.weights.folder import Info, make_folder, offload_weight, save_offload_index
from accel.weights.load import inferred_device_map
from accel.weights.sizes import Dtype
from accel.weights.tensors import (
    as_device,
    device_of,
    find_tied_parameters,
    held_in,
    like,
    retie_parameters,
)

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
    problems = unknown_modules(model, "skip_modules", skipped or ())
    ConfigError.raise_if([*problems, *unknown_modules(model, "keep_in_fp32_modules", kept)])
    spared = {*(_heads(model) if skipped is None else skipped), *kept}
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not lies_within(name, spared)
    ]
    if not found:
        logger.warning("No linear modules were found in your model, so nothing is quantized.")
    return found


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


_MAX_NAMED = 10
_MARKS = ("is_loaded_in_8bit", "is_loaded_in_4bit")


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: PathLike | None = None,
    device_map: DeviceMap | str | None = None,
    no_split_module_classes: Collection[str] | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: PathLike | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantize the linear layers of a model to 8 or 4 bits, with weights of its own or of files.

    A file is read tensor by tensor, and each is quantized as it is read: the model is never in
    memory in full precision. Files may hold quantized weights, as `save_model` writes them.

    Args:
        model: on the meta device, or with weights; changed in place.
        bnb_quantization_config: what is quantized, and how.
        weights_location: a file of weights, an index of shards, or a folder that holds one of
            these; None: the model's own weights are quantized.
        device_map: device by full name of a submodule, or a word as of
            `load_checkpoint_and_dispatch`; None: the machine's accelerator, else the CPU. With
            4 bits, layers that it offloads are kept in `torch_dtype`.
        no_split_module_classes: names of classes whose instances go to one device as a whole.
        max_memory: bytes, or texts such as "1GB", by device; None: what is free.
        offload_folder: where weights on "disk" are written.
        offload_state_dict: whether files of `torch.save` are mapped into memory (safetensors are).

    Returns:
        The model.

    Raises:
        MissingPackageError: without bitsandbytes.
        ConfigError: for a model on the meta device without files, names that it has no module for,
            a map that offloads 8-bit layers, or one that offloads to "disk" without a folder.
        CheckpointError: for files that lack weights, or have them in another shape or format.

    Example:
        >>> with init_empty_weights():
        ...     model = Model(config)
        >>> quantization = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        >>> load_and_quantize_model(model, quantization, "checkpoint", device_map="auto")
    """
    bitsandbytes("load_and_quantize_model")
    config = bnb_quantization_config
    _check(model, weights_location)
    quantized = to_quantize(model, config)
    placed = _device_map(model, config, quantized, device_map, max_memory, no_split_module_classes)
    loading = _Loading(model, config, placed, offload_folder)
    if weights_location is None:
        state = dict(model.state_dict())
        loading.start(quantized, state)
        loading.load(state)
    else:
        source = files.find(weights_location, offload_state_dict)
        loading.start(quantized, source.shapes())
        for part in source.parts():
            loading.load(part)
    loading.finish("the model" if weights_location is None else fspath(weights_location))
    dispatch_model(model, placed, offload_dir=offload_folder)
    setattr(model, _MARKS[config.load_in_4bit], True)
    return model


def _check(model: nn.Module, location: PathLike | None) -> None:
    if any(getattr(model, mark, False) for mark in _MARKS):
        remedy = "Load the original model to quantize it in another way."
        raise ConfigError.of(type(model).__name__, "it is quantized already", remedy)
    if location is None and any(parameter.is_meta for parameter in model.parameters()):
        rule = "the model is on the meta device, so it has no weights to quantize"
        raise ConfigError.of("weights_location=None", rule, "Name the files of its weights.")


def _device_map(
    model: nn.Module,
    config: BnbQuantizationConfig,
    quantized: Iterable[str],
    device_map: DeviceMap | str | None,
    max_memory: MaxMemory | None,
    no_split: Collection[str] | None,
) -> DeviceMap:
    if device_map is None:
        kind = default_device_type()
        return {"": kind if kind in ("cpu", "mps") else torch.accelerator.current_device_index()}
    if isinstance(device_map, str):
        bits: Dtype = torch.int8 if config.load_in_8bit else CustomDtype.INT4
        kept = config.keep_in_fp32_modules or ()
        names = [name for name, _ in model.named_parameters()]
        special: dict[str, Dtype] = {f"{name}.weight": bits for name in quantized}
        special |= {name: torch.float32 for name in names if lies_within(name, kept)}
        device_map = inferred_device_map(
            device_map, model, max_memory, no_split, config.torch_dtype, special
        )
    check_device_map(model, device_map)
    return device_map


class _Loading:
    """Weights on their way into a model, some of whose layers are quantized."""

    def __init__(
        self,
        model: nn.Module,
        config: BnbQuantizationConfig,
        device_map: DeviceMap,
        folder: PathLike | None,
    ) -> None:
        self.model = model
        self.config = config
        self.device_map = device_map
        self.folder = folder
        self.ties = find_tied_parameters(model)
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.lacking = set(model.state_dict())
        self.unexpected: list[str] = []
        self.layers: dict[str, nn.Linear] = {}
        self.parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # by layer, read so far
        self.awaited: dict[str, set[str]] = defaultdict(set)  # by layer: names of its parts
        self.aliases: dict[str, list[str]] = {}  # names of tied weights that no file has
        self.index: dict[str, Info] = {}
        on_devices = [device for device in device_map.values() if str(device) not in ELSEWHERE]
        self.away = ELSEWHERE if on_devices else ("disk",)
        if "disk" in device_map.values() and folder is None:
            names = [name for name, device in device_map.items() if device == "disk"]
            value, rule = f"device_map sends {', '.join(names)} to 'disk'", "it needs a folder"
            raise ConfigError.of(value, rule, "Pass offload_folder='offload'.")

    def start(self, quantized: Sequence[str], names: Iterable[str]) -> None:
        """Put quantized layers in the place of linear ones, and expect weights of these names."""
        away = [name for name in quantized if self._is_away(name)]
        if away and self.config.load_in_8bit:
            value = f"device_map offloads {', '.join(away[:_MAX_NAMED])}"
            remedy = "Give them to an accelerator, or name them in skip_modules."
            raise ConfigError.of(value, "8-bit layers stay on their device", remedy)
        for name in quantized:
            if name not in away:
                self._replace(name)
        given = set(names)
        for group in self.ties:
            held = next((name for name in group if name in given), None)
            if held is not None:
                self.aliases[held] = [name for name in group if name not in given]
        for name in given.union(*self.aliases.values()):
            layer, key = self._layer_of(name)
            if layer and not is_plain(key):
                self.awaited[layer].add(key)

    def _is_away(self, name: str) -> bool:
        return str(device_of(name, self.device_map)) in self.away

    def _replace(self, name: str) -> None:
        owner, _, key = name.rpartition(".")
        linear = self.model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        self.layers[name] = empty_layer(linear, self.config)
        setattr(self.model.get_submodule(owner), key, self.layers[name])

    def _layer_of(self, name: str) -> tuple[str, str]:
        """Return the quantized layer that a weight belongs to, "" if none, and its name there."""
        layer = name
        while layer and layer not in self.layers:
            layer = layer.rpartition(".")[0]
        return layer, name[len(layer) + 1 :] if layer else name

    # -- weights ---------------------------------------------------------------------------

    def load(self, part: Mapping[str, object]) -> None:
        """Load some of the weights."""
        for given, value in part.items():
            for name in (given, *self.aliases.get(given, ())):
                layer, key = self._layer_of(name)
                if not isinstance(value, torch.Tensor):
                    self.unexpected.append(name)
                elif layer and not is_plain(key):
                    self._collect(layer, key, value)
                elif name in self.lacking:
                    self._place(name, value)
                elif not layer:
                    self.unexpected.append(name)

    def _collect(self, layer: str, key: str, value: torch.Tensor) -> None:
        """Keep a part of a quantized layer, and fill the layer once they are all there."""
        parts = self.parts[layer]
        parts[key] = value
        if parts.keys() < self.awaited[layer] or WEIGHT not in parts:
            return
        device = as_device(device_of(layer, self.device_map))
        fill(layer, self.layers[layer], self.parts.pop(layer), device, self.config)
        self.lacking.discard(f"{layer}.{WEIGHT}")

    def _place(self, name: str, value: torch.Tensor) -> None:
        """Bring a weight that is not quantized to its device, or to disk, in its dtype."""
        held, key = held_in(self.model, name)
        old = held[key]
        if old.shape != value.shape:
            rule = f"the model has {list(old.shape)}"
            remedy = "Build the model as it was when it was saved."
            raise CheckpointError(Problem(f"{name} of shape {list(value.shape)}", rule, remedy))
        if value.is_floating_point():
            kept = lies_within(name, self.config.keep_in_fp32_modules or ())
            value = value.to(torch.float32 if kept else self.config.torch_dtype)
        device = device_of(name, self.device_map)
        if device == "disk" and name in self.parameters:
            assert self.folder is not None
            make_folder(self.folder)
            offload_weight(value, name, self.folder, self.index)
            held[key] = like(old, value.to("meta"))
        else:  # a copy: what was read may be a view of the file
            place = torch.device("cpu") if device == "disk" else as_device(device)
            held[key] = like(old, value.to(place, copy=True))
        self.lacking.discard(name)

    def finish(self, location: str) -> None:
        """Tie weights again; raise for those that nothing was found for."""
        quantized = {f"{name}.{WEIGHT}" for name in self.layers}
        retie_parameters(self.model, [g for g in self.ties if quantized.isdisjoint(g)])
        tensors = {**self.model.state_dict(), **dict(self.model.named_buffers())}
        without = [
            name for name, value in tensors.items() if value.is_meta and name not in self.index
        ]
        if without:
            listed = ", ".join(without[:_MAX_NAMED])
            rule = f"it lacks {len(without)} weights that the model has no data for: {listed}"
            raise CheckpointError(Problem(location, rule, "Name files that have all of them."))
        if self.lacking or self.unexpected:
            logger.warning(
                "load_and_quantize_model(%r): missing: %s; not in the model: %s.",
                location,
                ", ".join(sorted(self.lacking)[:_MAX_NAMED]) or "none",
                ", ".join(self.unexpected[:_MAX_NAMED]) or "none",
            )
        if self.index and self.folder is not None:
            save_offload_index(self.index, self.folder)
