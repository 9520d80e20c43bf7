"""fp8 by torchao: linear layers multiply scaled 8-bit matrices; all else computes under bf16.

Weights, gradients and the state of optimizers stay as they are, so that checkpoints are those of a
run without fp8. Where there is no hardware for fp8, torchao emulates it: the matrices are rounded
to fp8, and multiplied in fp32.

Source: https://docs.pytorch.org/ao/stable/api_reference/api_ref_float8.html
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from accel.config.fp8 import AORecipeKwargs
from accel.config.handlers import AutocastKwargs
from accel.logging import get_logger, silenced
from accel.machine.errors import ConfigError, listed
from accel.machine.imports import require
from accel.precision.amp import AmpPrecision
from accel.precision.wrapping import is_dispatched

logger = get_logger(__name__)

# What torchao logs at import says nothing to a person who trains: kernels that this machine cannot
# load, a deprecation inside of it.
CHATTY = ("torchao", "torch.utils._pytree")
HARDWARE = (8, 9)  # compute capability from which GPUs multiply fp8


def import_torchao(module: str = "torchao.float8", purpose: str = "fp8 with torchao") -> Any:
    """Import and return a module of torchao, without its messages; `purpose`: what it is for."""
    with silenced(CHATTY, logging.ERROR):
        return require(module, purpose, extra="fp8")


def has_hardware(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HARDWARE


def linear_config(recipe: AORecipeKwargs, device: torch.device) -> Any:
    """Return the `Float8LinearConfig` of a recipe on a device.

    Args:
        recipe: as given.
        device: fp8 is emulated if it has no hardware for it.

    Raises:
        ConfigError: if `recipe.config` is of another class.
    """
    kind = import_torchao().Float8LinearConfig
    found = recipe.config
    if found is None or isinstance(found, str):
        found = dataclasses.replace(
            kind.from_recipe_name(found or "tensorwise"),
            pad_inner_dim=recipe.pad_inner_dim is not False,
            enable_fsdp_float8_all_gather=bool(recipe.enable_fsdp_float8_all_gather),
        )
    elif not isinstance(found, kind):
        raise ConfigError.of(
            f"AORecipeKwargs.config={found!r}",
            "it is a torchao.float8.Float8LinearConfig, or the name of a recipe",
            "Give Float8LinearConfig.from_recipe_name('rowwise'), say, or 'rowwise'.",
        )
    return dataclasses.replace(found, emulate=found.emulate or not has_hardware(device))


class TorchaoPrecision(AmpPrecision):
    """bf16 autocast around layers that torchao converts.

    Args:
        recipe: which layers, and how they are scaled.
        device: where the run computes.
        autocast: how the forward pass is cast.
    """

    def __init__(self, recipe: Any, device: torch.device, autocast: AutocastKwargs) -> None:
        super().__init__("fp8", device.type, autocast)
        self.recipe: AORecipeKwargs = recipe
        self.device = device

    def convert(
        self,
        model: torch.nn.Module,
        evaluation: bool = False,
        gathers: bool = False,
        keep: Collection[torch.nn.Module] = (),
    ) -> None:
        config = linear_config(self.recipe, self.device)
        if config.enable_fsdp_float8_all_gather and not gathers:
            config = self._without_gathering(config, evaluation)
        done = import_torchao("torchao.float8.float8_linear").Float8Linear
        chosen = choose_layers(model, self.recipe.module_filter_func, keep, evaluation, done)
        if "" in chosen:
            raise ConfigError.of(
                f"prepare: {type(model).__name__} with mixed_precision='fp8'",
                "layers are converted in their place, and this one is the model itself",
                "Put it into a module: torch.nn.Sequential(model).",
            )
        if not chosen:
            return
        if config.enable_fsdp_float8_all_gather:
            _refuse_tied(model, chosen)
        if config.emulate:
            logger.warning_once(
                "fp8 is emulated: %s has no hardware for it. Values are rounded as there; the run "
                "is slower than in bf16.",
                self.device.type,
            )
        convert_layers(model, chosen, config)
        logger.info("fp8: %d linear layers of %s converted.", len(chosen), type(model).__name__)

    @staticmethod
    def _without_gathering(config: Any, evaluation: bool) -> Any:
        """Return `config` for a model whose weights nobody gathers; refuse to train it so."""
        if not evaluation:
            raise ConfigError.of(
                "AORecipeKwargs.enable_fsdp_float8_all_gather=True",
                "weights that are not sharded are not gathered",
                "Leave it out, or shard the model.",
            )
        return dataclasses.replace(config, enable_fsdp_float8_all_gather=False)


def convert_layers(model: torch.nn.Module, chosen: dict[str, torch.nn.Linear], config: Any) -> None:
    """Replace layers of `model` by torchao's, which keep weights, hooks and attributes.

    Args:
        model: is changed in place.
        chosen: layers inside, by name.
        config: a `Float8LinearConfig`.

    Raises:
        ConfigError: if the forward pass of a layer is not that of its class, or its weight is no
            parameter in a floating-point format. Nothing is changed then.
    """
    others = [
        name
        for name, layer in chosen.items()
        if "forward" in vars(layer) or not has_own_weight(layer)
    ]
    if others:
        raise ConfigError.of(
            f"AORecipeKwargs.module_filter_func chooses {', '.join(others)}",
            "a layer in fp8 multiplies by a parameter of its own; here the weight is quantized or "
            "computed (by weight_norm, say), or the forward pass was replaced",
            "Leave it out in module_filter_func, or remove the parametrization.",
        )
    torchao = import_torchao()
    from accel.precision.float8_layer import Float8Linear  # which imports torchao

    layers = {id(layer): layer for layer in chosen.values()}
    torchao.convert_to_float8_training(
        model, module_filter_fn=lambda module, name: id(module) in layers, config=config
    )
    first: dict[int, torch.nn.Module] = {}
    for name, old in chosen.items():
        if id(old) in first:  # a shared layer in another place
            model.set_submodule(name, first[id(old)])
            continue
        new = first[id(old)] = model.get_submodule(name)
        kept = {k: v for k, v in vars(old).items() if k != "_parameters"}
        new.__dict__.update(kept)
        new.__class__ = Float8Linear


def _refuse_tied(model: torch.nn.Module, chosen: dict[str, torch.nn.Linear]) -> None:
    """Raise if the weight of a layer has another use: a weight that is gathered in fp8 has one."""
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    tied = [uses[id(m.weight)] for m in chosen.values() if len(uses[id(m.weight)]) > 1]
    if tied:
        raise ConfigError.of(
            f"AORecipeKwargs.enable_fsdp_float8_all_gather with tied weights: {', '.join(tied[0])}",
            "a weight that is gathered in fp8 belongs to one layer",
            "Leave the layer out in module_filter_func, or set the option to False.",
        )


# -- which linear layers compute in fp8: not the first, the last and the head -------------------


MULTIPLE = 16  # of which the matrix products of fp8 want both sizes of a weight
HEADS = ("lm_head",)
FilterFunction = Callable[[torch.nn.Module, str], bool]


def choose_layers(
    model: torch.nn.Module,
    filter_function: FilterFunction | None = None,
    keep: Collection[torch.nn.Module] = (),
    evaluation: bool = False,
    done: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] = (),
) -> dict[str, torch.nn.Linear]:
    """Return the layers of `model` to convert by name; log which ones keep their format.

    Args:
        model: the user's own module.
        filter_function: called with a module and its name; None: all linear layers but the first,
            the last and the head.
        keep: modules whose layers keep their format.
        evaluation: whether the model is only evaluated.
        done: classes of converted layers.

    Raises:
        ConfigError: if hooks place the weights, or no layer of a model that is trained is left.
    """
    if is_dispatched(model):
        raise ConfigError.of(
            "prepare: a model that was dispatched, with mixed_precision='fp8'",
            "hooks at its layers place their weights, and a converted layer has none",
            "Load it without a device map, or use bf16.",
        )
    kept = {id(module) for part in keep for module in part.modules()}
    linear = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.Linear) and id(module) not in kept
    }
    if filter_function is None:
        chosen = _default_choice(model, linear)
    else:
        chosen = {name: layer for name, layer in linear.items() if filter_function(layer, name)}
    if chosen or any(isinstance(module, done) for module in model.modules()):
        return chosen
    kind = type(model).__name__
    if filter_function is None and not evaluation:
        raise ConfigError.of(
            f"prepare: {kind} with mixed_precision='fp8'",
            "no layer would compute in fp8: the first and the last linear layer, the head, and "
            f"sizes that are no multiples of {MULTIPLE} keep their format",
            "Use bf16, or choose layers by a function of a module and its name, in a recipe by its "
            "dotted name: precision.fp8_torchao.module_filter_func=my_module.wanted, in a script "
            "AORecipeKwargs(module_filter_func=wanted).",
        )
    logger.warning("fp8: no layer of %s is converted; all of it computes in bf16.", kind)
    return chosen


def _default_choice(
    model: torch.nn.Module, linear: dict[str, torch.nn.Linear]
) -> dict[str, torch.nn.Linear]:
    layers = list(linear.values())
    left = {id(module) for module in (*heads(model), *layers[:1], *layers[-1:])}
    plain = {n: layer for n, layer in linear.items() if id(layer) not in left and is_plain(layer)}
    odd = {
        name: f"{name} ({layer.out_features} × {layer.in_features})"
        for name, layer in plain.items()
        if layer.out_features % MULTIPLE or layer.in_features % MULTIPLE
    }
    if odd:
        logger.warning(
            "fp8: these layers of %s compute in bf16, as their sizes (out × in) are no multiples "
            "of %d: %s.",
            type(model).__name__,
            MULTIPLE,
            listed(list(odd.values())),
        )
    return {name: layer for name, layer in plain.items() if name not in odd}


def is_plain(module: torch.nn.Linear) -> bool:
    """Return whether a layer computes as `torch.nn.Linear` does, with a parameter as its weight."""
    plain = type(module) is torch.nn.Linear and "forward" not in vars(module)
    return plain and has_own_weight(module)


def has_own_weight(module: torch.nn.Linear) -> bool:
    """Return whether the weight of a layer is a parameter in a floating-point format."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.is_floating_point()


def heads(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers that compute logits: by name, by the model's word, or tied to an embedding.

    The first layer and the head see the widest ranges of values, and a rounding there is a rounding
    of the loss.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, module in model.named_modules(remove_duplicate=False):
        tied = isinstance(module, torch.nn.Linear) and id(module.weight) in embeddings
        if tied or name.rpartition(".")[2] in HEADS:
            yield module
        output = getattr(module, "get_output_embeddings", None)
        found = output() if callable(output) else None
        if isinstance(found, torch.nn.Module):
            yield found
