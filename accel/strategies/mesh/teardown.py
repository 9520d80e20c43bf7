"""Leaving a mesh: its groups are destroyed, and what torch keeps of them is let go of.

A group lives on in whatever holds its object, and gloo's threads live as long as it does: a
process that trains again and again collects them, and one that ends with any of them may abort.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug

from accel.errors import StateError


class LeftGroup:
    """Stands in a model where a process group was: tells its size and rank, and refuses the rest.

    Args:
        group: still there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._size, self._rank = group.size(), group.rank()

    def size(self) -> int:
        """Return the number of processes that there were."""
        return self._size

    def rank(self) -> int:
        """Return the index that this process had among them."""
        return self._rank

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what copying and pickling ask for
            raise AttributeError(name)
        raise StateError(
            "The process group was destroyed by end_training(), so that sharded parameters can no "
            "longer be gathered. Train, evaluate and save before it, or build a new Accelerator() "
            "on every process."
        )


def leave(mesh: DeviceMesh, models: Iterable[torch.nn.Module], still_there: bool = True) -> None:
    """Destroy the groups of a mesh, but for the default one, and drop what holds them.

    Every rank calls this, with nothing under way.

    Args:
        mesh: of `build_mesh`.
        models: sharded over it.
        still_there: whether the groups are; else they went with the default group.
    """
    infos = [info for model in models for info in _mesh_infos(model)]
    meshes = {id(known): known for known in (mesh, *(info.mesh for info in infos))}
    groups: dict[int, dist.ProcessGroup] = {}
    if still_there:
        groups = {id(group): group for known in meshes.values() for group in known.get_all_groups()}
    for info in infos:
        for name, value in vars(info).items():
            if isinstance(value, dist.ProcessGroup):
                setattr(info, name, LeftGroup(value))
    for group in groups.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    for known in meshes.values():
        if hasattr(known, "_get_root_mesh"):  # from torch 2.10 on
            registry = getattr(known._get_root_mesh(), "_pg_registry", None)
            if registry is not None:  # from 2.11 on
                registry.clear()
    forget_meshes()


def units_of(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 gathers at once, unit by unit (torch has no public name for it)."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on, there are several
        found = [state._fsdp_param_group] if groups is None else groups
        yield from (unit for unit in found if unit is not None)


def initialize(model: Any) -> None:
    """Let `model` be the outermost of its units, as its forward pass does (no public name, too).

    A unit inside that is called before would be outermost itself.
    """
    model._get_fsdp_state()._lazy_init()


def reduce_after(model: Any, outputs: Any) -> Any:
    """Return `outputs` of a module in `model`; their backward pass ends by reducing gradients.

    It is what FSDP2 does with the outputs of `model` itself (no public name, too).
    """
    return model._get_fsdp_state()._register_pre_backward_hook(outputs)


def _mesh_infos(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 notes of the meshes of each of its units."""
    for unit in units_of(model):
        infos = (unit.mesh_info, unit.post_forward_mesh_info)
        yield from (info for info in infos if info is not None)


def forget_meshes() -> None:
    """Clear what DTensor keeps by mesh: an equal mesh of a later run talks through other groups.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/tensor/debug
    """
    if hasattr(debug, "_clear_sharding_prop_cache"):  # from torch 2.11 on
        debug._clear_sharding_prop_cache()
    else:
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache.cache_clear()
        if hasattr(debug, "_clear_fast_path_sharding_prop_cache"):  # 2.10
            debug._clear_fast_path_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # from torch 2.10 on
        _redistribute.clear_redistribute_planner_cache()
