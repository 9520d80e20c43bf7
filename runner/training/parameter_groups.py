"""Parameter groups of an optimizer by name patterns, and rates that fall with the layers' depth.

The groups that an optimizer was made with, such as decayed and not decayed parameters, are divided
further: so every optimizer can have them, whoever makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from accel.machine.errors import Problem, Problems, nearest
from accel.strategies.compile import repeated_blocks

OWN = ("match", "name", "lr_scale")  # keys of a group that are no options of an optimizer
KEY = "optimizer.groups"


def regroup(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    groups: Sequence[Mapping[str, Any]] = (),
    layer_decay: float = 1.0,
) -> None:
    """Divide the parameter groups of an optimizer.

    Args:
        optimizer: of parameters of the model, without state.
        model: gives the parameters their names and depths.
        groups: of each `match`, a pattern of names or several; `lr_scale`, which multiplies the
            rate; `name` in the logs; and options of the optimizer. A parameter is in the first that
            matches. Those that none matches come first and keep their options.
        layer_decay: the rate of a layer over that of the next; the last one has the full rate.

    Raises:
        ConfigError: naming patterns that match nothing, options that the optimizer has not, and a
            decay out of range.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    problems = Problems(_problems(groups, optimizer, names.values()))
    if not (isinstance(layer_decay, (int, float)) and 0 < layer_decay <= 1):
        value = f"optimizer.layer_decay={layer_decay}"
        problems.add(value, "it is above 0 and at most 1", "Set optimizer.layer_decay=0.75.")
    problems.raise_if()
    depths = layers(model) if layer_decay < 1 else {}
    last = max(depths.values(), default=0)
    made_with = optimizer.param_groups
    parts: dict[tuple[int, int, int], list[torch.nn.Parameter]] = {}
    for number, group in enumerate(made_with):
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            matching = (i for i, one in enumerate(groups) if _matches(name, one["match"]))
            key = (next(matching, -1), depths.get(id(parameter), last), number)
            parts.setdefault(key, []).append(parameter)
    # The first group's rate is logged as `lr`: that of the default options and the last layer.
    parts = dict(sorted(parts.items(), key=lambda part: (part[0][0], -part[0][1], part[0][2])))
    optimizer.param_groups = []
    for (index, depth, number), parameters in parts.items():
        own = groups[index] if index >= 0 else {}
        options = {k: v for k, v in made_with[number].items() if k not in ("params", "param_names")}
        for option, value in own.items():
            if option not in OWN:
                options[option] = tuple(value) if isinstance(value, list) else value
        options["lr"] = options["lr"] * own.get("lr_scale", 1.0) * layer_decay ** (last - depth)
        label = [str(own.get("name", index))] if own else []
        label += [f"layer{depth}"] if depths else []
        label += [options["name"]] if "name" in options else []
        options["name"] = "_".join(label) or "default"
        optimizer.add_param_group({"params": parameters, **options})


def layers(model: torch.nn.Module) -> dict[int, int]:
    """Return the depth of each parameter by its `id`, from 0.

    The layers are the repeated blocks of the model, with one before and one after them; in a model
    without such blocks, the modules that own parameters, in their order.

    Source: K. Clark et al., ELECTRA, arXiv:2003.10555; H. Bao et al., BEiT, arXiv:2106.08254.
    """
    blocks = repeated_blocks(model) or [
        module
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    own = {id(p): depth for depth, block in enumerate(blocks, 1) for p in block.parameters()}
    found: dict[int, int] = {}
    outside = 0
    for parameter in model.parameters():
        found[id(parameter)] = own.get(id(parameter), outside)
        if id(parameter) in own:
            outside = len(blocks) + 1
    return found


def _matches(name: str, patterns: str | Sequence[str]) -> bool:
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in listed)


def _problems(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, names: Any
) -> list[Problem]:
    found = Problems()
    example = f"Write {KEY}='[{{match: [head.*], lr: 1e-3}}]'."
    known = {*OWN, *optimizer.param_groups[0]} - {"params", "param_names"}
    for number, group in enumerate(groups if isinstance(groups, (list, tuple)) else [groups]):
        place = f"{KEY}[{number}]"
        if not isinstance(group, Mapping) or not group.get("match"):
            found.add(f"{place}={group!r}", "a group has `match`, patterns of names", example)
            continue
        for key in group.keys() - known:
            rule = f"{type(optimizer).__name__} has no such option"
            found.add(f"{place}.{key}={group[key]!r}", rule, nearest(str(key), known))
        listed = [group["match"]] if isinstance(group["match"], str) else group["match"]
        for pattern in listed:
            if not any(_matches(name, pattern) for name in names):
                rule = "no parameter has such a name"
                found.add(f"{place}.match: {pattern}", rule, nearest(pattern, names))
    return found
