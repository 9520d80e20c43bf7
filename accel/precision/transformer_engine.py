"""fp8 by TransformerEngine: its layers in the place of torch's, and its autocast around a forward.

Layers keep their parameters, the very same tensors under the same names, so that optimizers, tied
weights and checkpoints are those of a run without fp8. The scales that TransformerEngine keeps
beside them (its extra state) are a file of their own in a checkpoint: `scales`.

Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel.config.fp8 import DELAYED_SCALING, TERecipeKwargs
from accel.config.handlers import AutocastKwargs
from accel.logging import get_logger
from accel.machine.errors import CheckpointError, ConfigError, Problem, Problems
from accel.machine.imports import require
from accel.precision.amp import AmpPrecision
from accel.precision.fp8 import choose_layers, is_plain
from accel.precision.wrapping import wrap_forward

logger = get_logger(__name__)

EXTRA_STATE = "_extra_state"


def import_engine(module: str = "transformer_engine.pytorch") -> Any:
    """Import and return a module of TransformerEngine.

    Raises:
        MissingPackageError: if it is not installed.
        ConfigError: if it is too old.
    """
    found: Any = require(module, "fp8 with TransformerEngine", "transformer-engine[pytorch]")
    if module == "transformer_engine.pytorch" and not hasattr(found, "autocast"):
        raise ConfigError.of(
            "the installed TransformerEngine",
            "fp8 needs release 2.9 or later",
            "Run pip install -U transformer-engine[pytorch].",
        )
    return found


# -- layers --------------------------------------------------------------------------------


def convert_model(
    model: torch.nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace linear and layer-norm layers by TransformerEngine's, or the other way, in place.

    Layers whose sizes are no multiples of 16 stay. Parameters stay the same tensors.

    Args:
        model: its layers inside are replaced.
        to_transformer_engine: whether torch's layers are replaced by TransformerEngine's; else its
            by torch's.
        _convert_linear: whether linear layers are replaced.
        _convert_ln: whether layer norms are replaced.

    Raises:
        MissingPackageError: if TransformerEngine is not installed.
    """
    _convert(model, to_transformer_engine, _convert_linear, _convert_ln, lambda layer: True)


def _convert(
    model: torch.nn.Module,
    to_engine: bool,
    linear: bool,
    norms: bool,
    wanted: Callable[[torch.nn.Module], bool],
) -> None:
    engine = import_engine()
    replaced: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # a shared layer in all of its places
            if child is None:
                continue
            if id(child) not in replaced:
                is_linear = isinstance(child, torch.nn.Linear | engine.Linear)
                switched_on = (linear if is_linear else norms) and wanted(child)
                new = _replacement(child, engine, to_engine) if switched_on else None
                if new is None:
                    continue
                replaced[id(child)] = (child, _adopted(child, new))
            setattr(parent, name, replaced[id(child)][1])


def _replacement(layer: torch.nn.Module, engine: Any, to_engine: bool) -> torch.nn.Module | None:
    """Return the layer of the other library, with weights of its own; None: there is none."""
    kinds = (engine.Linear, engine.LayerNorm)
    if isinstance(layer, kinds) == to_engine:
        return None
    weight: Any = getattr(layer, "weight", None)
    if weight is None or (to_engine and any(size % 16 for size in weight.shape)):
        return None
    like = {"device": weight.device}
    if isinstance(layer, torch.nn.Linear) and to_engine and is_plain(layer):
        has_bias = layer.bias is not None
        sizes = (layer.in_features, layer.out_features)
        return engine.Linear(*sizes, bias=has_bias, params_dtype=weight.dtype, **like)
    if type(layer) is torch.nn.LayerNorm and to_engine:
        one_dim = len(layer.normalized_shape) == 1 and layer.bias is not None
        shape = layer.normalized_shape[0]
        make = functools.partial(engine.LayerNorm, shape, eps=layer.eps)
        return make(params_dtype=weight.dtype, **like) if one_dim else None
    if isinstance(layer, engine.Linear):
        sizes, bias = (layer.in_features, layer.out_features), getattr(layer, "bias", None)
        has_bias = bias is not None and bias.numel() > 0
        return torch.nn.Linear(*sizes, bias=has_bias, dtype=weight.dtype, **like)
    if isinstance(layer, engine.LayerNorm):
        return torch.nn.LayerNorm(weight.shape, eps=layer.eps, dtype=weight.dtype, **like)
    return None


def _adopted(old: torch.nn.Module, new: torch.nn.Module) -> torch.nn.Module:
    """Return `new` with the parameters and the mode of `old`, without extra state in its state."""
    for name in list(dict(new.named_parameters(recurse=False))):
        setattr(new, name, getattr(old, name))
    new.train(old.training)
    _keep_extra_state_out(new)
    return new


def _keep_extra_state_out(layer: torch.nn.Module) -> None:
    """Leave the extra state of a layer out of state dicts: it is a pickle, which could run code."""
    hooks = layer._state_dict_hooks.values()
    if hasattr(layer, "get_extra_state") and _drop_extra_state not in hooks:
        layer.register_state_dict_post_hook(_drop_extra_state)
        layer.register_load_state_dict_pre_hook(_drop_extra_state)
        layer.register_load_state_dict_post_hook(_expect_no_extra_state)


def _drop_extra_state(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    state.pop(prefix + EXTRA_STATE, None)


def _expect_no_extra_state(module: torch.nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(EXTRA_STATE)]


def has_transformer_engine_layers(model: torch.nn.Module) -> bool:
    """Return whether a model has layers of TransformerEngine.

    Args:
        model: any module.

    Raises:
        MissingPackageError: if TransformerEngine is not installed.
    """
    engine = import_engine()
    kinds = (engine.Linear, engine.LayerNorm)
    kinds += tuple(
        kind
        for name in ("LayerNormLinear", "LayerNormMLP", "TransformerLayer", "RMSNorm")
        if (kind := getattr(engine, name, None)) is not None
    )
    return any(isinstance(module, kinds) for module in model.modules())


# -- autocast ------------------------------------------------------------------------------


def engine_recipe(handler: TERecipeKwargs | None = None) -> Any:
    """Return TransformerEngine's recipe object of a handler; None: delayed scaling.

    Raises:
        ConfigError: for fields that the installed release does not know, where they are set.
    """
    handler = handler or TERecipeKwargs()
    recipes = import_engine("transformer_engine.common.recipe")
    chosen = "MXFP8BlockScaling" if handler.use_mxfp8_block_scaling else "DelayedScaling"
    kind = getattr(recipes, chosen)
    owner = type(handler).__name__
    known = inspect.signature(kind).parameters
    found, fields = Problems(), {}
    for name, default in DELAYED_SCALING.items():
        value = getattr(handler, name)
        if name == "use_autocast_during_eval":  # a field of ours
            continue
        if name == "fp8_format" and handler.use_mxfp8_block_scaling and value == default:
            continue  # blocks are E4M3 by default
        if name in known:
            is_format = name == "fp8_format"
            fields[name] = getattr(recipes.Format, str(value)) if is_format else value
        elif value != default:
            rule = f"{chosen} of the installed TransformerEngine has no such field"
            found.add(f"{owner}.{name}={value!r}", rule, "Leave it out.")
    found.raise_if()
    return kind(**fields)


def fp8_autocast(enabled: bool, recipe: Any) -> AbstractContextManager[object]:
    """Return TransformerEngine's context."""
    context: AbstractContextManager[object] = import_engine().autocast(
        enabled=enabled, recipe=recipe
    )
    return context


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward method that runs another under TransformerEngine's autocast.

    Args:
        model_forward: the bound method.
        fp8_recipe: TransformerEngine's recipe object.
        use_during_eval: whether a module in evaluation mode computes in fp8, too.

    Returns:
        A function of the module and the arguments of `model_forward`.

    Example:
        >>> forward = contextual_fp8_autocast(model.forward, recipe)
        >>> model.forward = types.MethodType(forward, model)
    """

    @functools.wraps(model_forward)
    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> Any:
        with fp8_autocast(use_during_eval or self.training, fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


class ModelContext:
    """Makes the contexts of a model's forward passes: autocast, and TransformerEngine's.

    An object that refers to the model: a deep copy of both refers to the copy.
    """

    def __init__(
        self, model: torch.nn.Module, amp: AmpPrecision | None, recipe: Any, evaluates: bool
    ) -> None:
        self.model, self.amp, self.recipe, self.evaluates = model, amp, recipe, evaluates

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        own = fp8_autocast(self.evaluates or self.model.training, self.recipe)
        with self.amp.autocast() if self.amp else contextlib.nullcontext(), own:
            yield


def apply_fp8_autowrap(
    model: torch.nn.Module, fp8_recipe_handler: TERecipeKwargs | None = None
) -> torch.nn.Module:
    """Run the forward passes of a model under TransformerEngine's autocast.

    Args:
        model: with layers of TransformerEngine, as `convert_model` makes them.
        fp8_recipe_handler: the recipe; None: delayed scaling.

    Returns:
        `model` itself.
    """
    handler = fp8_recipe_handler or TERecipeKwargs()
    evaluates = bool(handler.use_autocast_during_eval)
    context = ModelContext(model, None, engine_recipe(handler), evaluates)
    wrap_forward(model, context, outputs_in_fp32=False)
    return model


class TransformerEnginePrecision(AmpPrecision):
    """bf16 autocast, and TransformerEngine's autocast around layers of its own.

    Args:
        handler: the recipe.
        device_type: where the run computes.
        autocast: how the forward pass is cast.
    """

    def __init__(self, handler: Any, device_type: str, autocast: AutocastKwargs) -> None:
        super().__init__("fp8", device_type, autocast)
        self.recipe_handler: TERecipeKwargs = handler
        self.recipe = engine_recipe(handler)

    def wrap_forward(self, model: torch.nn.Module, outputs_in_fp32: bool = True) -> None:
        evaluates = bool(self.recipe_handler.use_autocast_during_eval)
        context = ModelContext(model, self, self.recipe, evaluates)
        wrap_forward(model, context, outputs_in_fp32)

    def convert(
        self,
        model: torch.nn.Module,
        evaluation: bool = False,
        gathers: bool = False,
        keep: Collection[torch.nn.Module] = (),
    ) -> None:
        if has_transformer_engine_layers(model):  # built of them, or converted by hand: as chosen
            for layer in scaled_layers(model).values():
                _keep_extra_state_out(layer)
            return
        layers = choose_layers(model, None, keep, evaluation).values()
        chosen = {id(layer) for layer in layers}
        _convert(model, True, True, False, lambda layer: id(layer) in chosen)
        logger.info("fp8: %d linear layers of %s converted.", len(chosen), type(model).__name__)

    def scales(self, model: torch.nn.Module) -> dict[str, dict[str, object]]:
        return read_scales(model)

    def load_scales(self, model: torch.nn.Module, scales: dict[str, dict[str, object]]) -> None:
        write_scales(model, scales, self.recipe)


# -- the scales of transformerengine's layers as plain tensors, for checkpo -------------------


RECIPE = "recipe"  # the one entry that is no plain value
PLAIN = (torch.Tensor, bool, int, float, str, list, tuple, dict, type(None))


def read_scales(model: torch.nn.Module) -> dict[str, dict[str, object]]:
    """Return the scales of the layers of a model, by name; layers without any are left out."""
    found: dict[str, dict[str, object]] = {}
    for name, layer in scaled_layers(model).items():
        state: Any = layer.get_extra_state()
        if isinstance(state, torch.Tensor) and state.numel() > 0:
            # Of the layer in this process, not of a file.
            entries = pickle.loads(state.cpu().numpy().tobytes())
            found[name] = {k: v for k, v in entries.items() if k != RECIPE and isinstance(v, PLAIN)}
    return found


def write_scales(
    model: torch.nn.Module, scales: Mapping[str, Mapping[str, object]], recipe: object
) -> None:
    """Give the layers of a model the scales that `read` returned.

    Args:
        model: with the same layers.
        scales: by name of the layer.
        recipe: TransformerEngine's, of this run.

    Raises:
        CheckpointError: if a layer is missing, or does not take them.
    """
    known = scaled_layers(model)
    for name, entries in scales.items():
        try:
            blob = bytearray(pickle.dumps({**entries, RECIPE: recipe}))
            known[name].set_extra_state(torch.frombuffer(blob, dtype=torch.uint8))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            rule = f"the scales of a layer in fp8 do not fit: {error}"
            remedy = "Resume with the same model and fp8 recipe, or without fp8."
            raise CheckpointError(Problem(f"layer {name!r}", rule, remedy)) from error


def scaled_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers of TransformerEngine in a model that keep extra state, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer).__module__.startswith("transformer_engine")
        and type(layer).get_extra_state is not torch.nn.Module.get_extra_state
    }
