"""Matrices split over neighbours, as a plan of module patterns says.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from accel.config.tensor_parallel import ALIASES, SUMMED, plan_problems
from accel.errors import ConfigError, Problem, nearest
from accel.strategies.mesh.tp_gradients import sum_gradients
from accel.wrapping import own_module


def split_matrices(model: torch.nn.Module, mesh: DeviceMesh, plan: Any = None) -> None:
    """Split the modules of `model` that a plan names, in place.

    Every rank holds the same weights before, so that nothing is exchanged.

    Args:
        model: on the device.
        mesh: 1-D, the axis of tensor parallelism.
        plan: pattern → style; None: the model's own.

    Raises:
        ConfigError: if there is no plan, a pattern names no module, a size does not divide, or
            tied weights would come apart.
    """
    split = resolve_plan(model, plan)
    _check_sizes(model, split.styles, mesh.size())
    before = dict(model.named_parameters(remove_duplicate=False))
    for name, style in split.styles.items():
        style.src_data_rank = None
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    tie_again(model, before)
    for name in split.summed:
        _sum(model, name, mesh)


def _sum(model: torch.nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Sum the gradient of a parameter that is whole.

    Raises:
        ConfigError: if it is split.
    """
    if isinstance(model.get_parameter(name), DTensor):
        raise ConfigError(
            Problem(
                f"tp_plan: {_plain(name)} is split, and {SUMMED}",
                "a parameter is one or the other",
                "Leave one of the two patterns out, or name single parameters.",
            )
        )
    owner, _, attribute = name.rpartition(".")
    sum_gradients(model.get_submodule(owner), attribute, mesh)


@dataclass(frozen=True)
class Split:
    """What a plan says of one model, by the model's own names.

    Attributes:
        styles: of modules.
        summed: whole parameters whose gradients are summed.
    """

    styles: dict[str, ParallelStyle]
    summed: list[str]


def resolve_plan(model: torch.nn.Module, plan: Any = None) -> Split:
    """Return the style of each module that a plan names.

    Args:
        model: the model; whether it or its parts are compiled does not change their names.
        plan: pattern → style; None: ``model.tp_plan``, else ``model._tp_plan``.

    Raises:
        ConfigError: naming every pattern that fits no module.
    """
    where = "TorchTensorParallelPlugin.tp_plan"
    if plan is None:
        plan = _own_plan(model)
        where = f"{type(own_module(model)).__name__}.tp_plan"
    problems = plan_problems(where, plan)
    ConfigError.raise_if(problems)
    modules = _by_plain_name(name for name, _ in model.named_modules())
    parameters = _by_plain_name(name for name, _ in model.named_parameters(remove_duplicate=False))
    styles: dict[str, ParallelStyle] = {}
    summed: list[str] = []
    for pattern, style in plan.items():
        known = [*modules, *parameters] if style == SUMMED else list(modules)
        matches = [name for name in known if _matches(name, pattern)]
        if not matches:
            rule = "no module of the model is called so"
            problems.append(Problem(f"{where}[{pattern!r}]", rule, nearest(pattern, known)))
        elif style == SUMMED:
            inside = (n for n in parameters if any(f"{n}.".startswith(f"{m}.") for m in matches))
            summed += [parameters[name] for name in inside]
        else:
            styles.update({modules[name]: _style(style) for name in matches})
    ConfigError.raise_if(problems)
    return Split(styles, list(dict.fromkeys(summed)))


def _by_plain_name(names: Iterable[str]) -> dict[str, str]:
    """Return names by what they are called without `torch.compile`; of two, the inner one."""
    return {plain: name for name in names if (plain := _plain(name))}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _own_plan(model: torch.nn.Module) -> Any:
    """Return the plan that a model has itself.

    Raises:
        ConfigError: if it has none.
    """
    own = own_module(model)
    plan = getattr(own, "tp_plan", None) or getattr(own, "_tp_plan", None)
    if not plan:
        raise ConfigError(
            Problem(
                f"tensor parallelism of {type(own).__name__}",
                "neither the model nor the plugin has a tp_plan",
                "Give TorchTensorParallelPlugin(tp_plan={'layers.*.up': 'colwise', …}).",
            )
        )
    return plan


def _matches(name: str, pattern: str) -> bool:
    """Return whether `name` fits `pattern`, in which ``*`` stands for one part between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _style(style: str | ParallelStyle) -> ParallelStyle:
    """Return a style of its own for one module."""
    if isinstance(style, ParallelStyle):
        return style
    known: dict[str, Any] = {
        "colwise": lambda: ColwiseParallel(),
        "rowwise": lambda: RowwiseParallel(),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    built: ParallelStyle = known[ALIASES.get(style, style)]()
    return built


def _check_sizes(model: torch.nn.Module, styles: Mapping[str, ParallelStyle], parts: int) -> None:
    problems = []
    for name, style in styles.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        embedding = isinstance(model.get_submodule(name), torch.nn.Embedding)
        if isinstance(style, ColwiseParallel):
            dim = 1 if embedding else 0
        elif isinstance(style, RowwiseParallel):
            dim = 0 if embedding else 1
        else:
            continue
        shape = tuple(weight.shape)
        if shape[dim] % parts:
            problems.append(
                Problem(
                    f"tp_plan: {_plain(name)}.weight of {shape} split along dim {dim}",
                    f"each of the {parts} processes holds as much",
                    "Choose a tp_size that divides it, or leave the module out of the plan.",
                )
            )
    ConfigError.raise_if(problems)


def tie_again(model: torch.nn.Module, before: Mapping[str, torch.nn.Parameter]) -> None:
    """Let names that shared a parameter share one again after it was split.

    Args:
        model: split.
        before: the parameters by name, under all their names, as they were.

    Raises:
        ConfigError: if they were split in different ways.
    """
    firsts: dict[int, str] = {}
    for name, old in before.items():
        first = firsts.setdefault(id(old), name)
        if first == name:
            continue
        kept, other = model.get_parameter(first), model.get_parameter(name)
        if kept is other:
            continue
        if _layout(kept) != _layout(other):
            raise ConfigError(
                Problem(
                    f"tp_plan: {_plain(first)} and {_plain(name)} are one parameter",
                    "all its uses are split alike",
                    "Give both modules styles that split the weight alike (rowwise_rep for an "
                    "embedding, colwise_rep for the output), or leave both out.",
                )
            )
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, kept)


def _layout(parameter: torch.nn.Parameter) -> Any:
    return parameter.placements if isinstance(parameter, DTensor) else None
