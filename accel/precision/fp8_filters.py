"""Which linear layers compute in fp8: not the first, the last and the head, nor odd sizes.

Source: https://docs.pytorch.org/ao/stable/pretraining.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch

from accel.logging import get_logger
from accel.machine.errors import ConfigError
from accel.precision.wrapping import is_dispatched

logger = get_logger(__name__)

MULTIPLE = 16  # of which the matrix products of fp8 want both sizes of a weight
HEADS = ("lm_head",)
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # in a dotted name
FilterFunction = Callable[[torch.nn.Module, str], bool]


@dataclass
class Choice:
    """The linear layers of a model that are converted, and why others are not, by name.

    Attributes:
        converted: layers to convert.
        odd_sizes: weights whose sizes are no multiples of 16, as (out, in).
    """

    converted: dict[str, torch.nn.Linear] = field(default_factory=dict)
    odd_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)


def choose_layers(
    model: torch.nn.Module,
    filter_function: FilterFunction | None = None,
    keep: Collection[torch.nn.Module] = (),
    evaluation: bool = False,
    done: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] = (),
) -> Choice:
    """Return the layers of `model` to convert; log which ones keep their format for their sizes.

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
    named = {n: m for n, m in model.named_modules(remove_duplicate=False) if id(m) not in kept}
    choice = Choice()
    if filter_function is None:
        _choose(model, named, choice)
    else:
        for name, module in named.items():
            if isinstance(module, torch.nn.Linear) and filter_function(module, name):
                choice.converted[name] = module
    _check(model, choice, filter_function is None, evaluation, done)
    return choice


def _choose(model: torch.nn.Module, named: dict[str, torch.nn.Module], choice: Choice) -> None:
    linear = {n: m for n, m in named.items() if isinstance(m, torch.nn.Linear)}
    left = {id(module) for module in heads(model)}
    left |= {id(module) for module in (*list(linear.values())[:1], *list(linear.values())[-1:])}
    for name, module in linear.items():
        if id(module) in left or not is_plain(module):
            continue
        sizes = (module.out_features, module.in_features)
        if any(size % MULTIPLE for size in sizes):
            choice.odd_sizes[name] = sizes
        else:
            choice.converted[name] = module


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


def _grouped(sizes: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Yield a text for each layer, or for all of one size whose names differ in numbers only."""
    groups: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for name, size in sizes.items():
        groups.setdefault((NUMBER.sub("*", name), size), []).append(name)
    for (pattern, (out, into)), names in groups.items():
        if len(names) == 1:
            yield f"{names[0]} ({out} × {into})"
        else:
            yield f"{pattern} ({out} × {into}, {len(names)} layers)"


def _check(
    model: torch.nn.Module,
    choice: Choice,
    by_default: bool,
    evaluation: bool,
    done: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...],
) -> None:
    """Name what keeps its format; refuse a model that is trained with nothing converted."""
    if choice.odd_sizes:
        logger.warning(
            "fp8: these layers of %s compute in bf16, as their sizes (out × in) are no multiples "
            "of %d: %s.",
            type(model).__name__,
            MULTIPLE,
            ", ".join(_grouped(choice.odd_sizes)),
        )
    if choice.converted or any(isinstance(module, done) for module in model.modules()):
        return
    kind = type(model).__name__
    if by_default and not evaluation:
        raise ConfigError.of(
            f"prepare: {kind} with mixed_precision='fp8'",
            "no layer would compute in fp8: the first and the last linear layer, the head, and "
            f"sizes that are no multiples of {MULTIPLE} keep their format",
            "Use bf16, or choose layers by a function of a module and its name, in a recipe by its "
            "dotted name: precision.fp8_torchao.module_filter_func=my_module.wanted, in a script "
            "AORecipeKwargs(module_filter_func=wanted).",
        )
    logger.warning("fp8: no layer of %s is converted; all of it computes in bf16.", kind)
