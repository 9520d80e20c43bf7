"""Modules that FSDP2 leaves whole on every process, and the gradients of those that are trained.

FSDP2 neither shards their parameters, nor moves them to the device, nor reduces their gradients.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.errors import ConfigError, Problem, nearest
from accel.memory_estimate import local
from accel.strategies.mesh.device_mesh import TENSOR


def ignored_modules(model: torch.nn.Module, given: Any) -> list[torch.nn.Module]:
    """Return the modules that are not sharded, in the model's order, which all ranks share.

    Args:
        model: not sharded yet.
        given: modules, or names and regular expressions of names; None: none.

    Raises:
        ConfigError: for what is in no module of the model.
    """
    if given is None:
        return []
    entries = [given] if isinstance(given, (str, torch.nn.Module)) else list(given)
    named = dict(model.named_modules())
    found: set[torch.nn.Module] = set()
    problems = []
    for entry in entries:
        if isinstance(entry, torch.nn.Module):
            matches = [module for module in named.values() if module is entry]
        else:
            matches = [m for name, m in named.items() if name and re.fullmatch(str(entry), name)]
        found.update(matches)
        if not matches:
            what = entry if isinstance(entry, str) else type(entry).__name__
            remedy = nearest(str(what), [name for name in named if name])
            rule = "no module of the model is called so"
            problems.append(Problem(f"ignored_modules: {what!r}", rule, remedy))
    ConfigError.raise_if(problems)
    return [module for module in named.values() if module in found]


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return what `modules` hold at present: settling and splitting replace parameters."""
    found = (parameter for module in modules for parameter in module.parameters())
    return list(dict.fromkeys(found))


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Average the gradients of `parameters` over the ranks that read different data, in place.

    A gradient that was averaged before, and to which something was added since, comes out right,
    too. Every rank calls this with the same parameters; one of them that has no gradient where
    another has counts as zeros.

    Args:
        parameters: trained, and whole on every rank that reads data of its own.
        mesh: the mesh of the run.
    """
    names = [name for name in mesh.mesh_dim_names or () if name != TENSOR]
    groups = [mesh.get_group(name) for name in names if mesh[name].size() > 1]
    if not groups:
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for same in kinds.values():
        missing = [index for index, parameter in enumerate(same) if parameter.grad is None]
        for index in missing:
            same[index].grad = torch.zeros_like(same[index])
        own = [local(parameter.grad) for parameter in same if parameter.grad is not None]
        # Who has a gradient at all travels along, so that what nobody uses is left without.
        has = own[0].new_ones(len(same))
        for index in missing:
            has[index] = 0
        flat = torch.cat([*(part.reshape(-1) for part in own), has])
        for group in groups:
            flat /= group.size()  # first: a sum may be too large for fp16
            dist.all_reduce(flat, group=group)
        *parts, found = flat.split([*(part.numel() for part in own), len(same)])
        for gradient, part in zip(own, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        for index in missing:  # only here does the host wait for the device
            if not found[index]:
                same[index].grad = None
