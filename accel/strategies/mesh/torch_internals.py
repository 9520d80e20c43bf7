"""Private names of torch that FSDP2 and DTensor need here; no other file of this room touches any.

All of them were checked with torch 2.9 to 2.13.

Source: https://github.com/pytorch/pytorch/tree/v2.13.0/torch/distributed/fsdp/_fully_shard
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, _collective_utils, _redistribute, debug
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp.wrap import _Policy

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., None])
Models = Iterable[torch.nn.Module]
pytree = _pytree  # nested data, also in containers that libraries register


def outside_graphs(function: Hook) -> Hook:
    """Decorate a hook that is no part of compiled graphs."""
    return cast(Hook, _disable_dynamo(function))


def forget_scale(weight: object) -> None:
    """Let torchao compute the scale of a sharded weight as it gathers it; others stay."""
    if isinstance(weight, DTensor) and hasattr(weight._local_tensor, "_precomputed_scale"):
        weight._local_tensor._precomputed_scale = None


# -- FSDP2's parameter groups --------------------------------------------------------------


def param_groups(models: Models) -> Iterator[FSDPParamGroup]:
    """Yield the parameter groups of FSDP units; a unit has several from torch 2.12 on."""
    for model in models:
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                yield from own_groups(unit)


def own_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    """Return the parameter groups of an FSDP unit, without those of units inside."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def make_root(model: FSDPModule) -> None:
    """Make `model` the root of its units, as its first forward pass does.

    A unit inside that is called before would become a root itself.
    """
    model._get_fsdp_state()._lazy_init()


def reduce_gradients_after(model: FSDPModule, outputs: T) -> T:
    """Return `outputs` of a submodule; their backward pass ends by reducing the gradients of model.

    FSDP2 does so with the outputs of `model` itself.
    """
    return model._get_fsdp_state()._register_pre_backward_hook(outputs)


def any_unsharded(models: Models) -> bool:
    """Return whether any parameters are all-gathered at present."""
    return any(not group.is_sharded for group in param_groups(models))


def unsharded_and_sharded(
    models: Models,
) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield each parameter that was ever all-gathered, and its shard."""
    for group in param_groups(models):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):  # from the first all-gather on
                yield parameter._unsharded_param, parameter.sharded_param


def unreduced_gradients(models: Models) -> Iterator[torch.Tensor]:
    """Yield gradients that backward passes without synchronization have accumulated."""
    for group in param_groups(models):
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            held = (parameter.unsharded_accumulated_grad, getattr(unsharded, "grad", None))
            yield from (gradient for gradient in held if gradient is not None)


@outside_graphs
def keep_requires_grad(groups: Iterable[FSDPParamGroup]) -> None:
    """Let FSDP2 follow parameters of `groups` that were frozen or unfrozen since their last pass.

    It gives the gathered parameter the flag of the shard, and not the other way round; within a
    window of micro-batches, `module.requires_grad_()` finds gathered parameters. It infers the
    dtype of gradient reduction once, from the parameters trained then: a frozen unit has none.
    """
    for group in groups:
        if group.is_unsharded:
            for parameter in group.fsdp_params:
                parameter.sharded_param.requires_grad_(parameter._unsharded_param.requires_grad)
        # The first pass infers it; until then, there is no attribute.
        infers = hasattr(group, "_orig_dtype") and group._orig_dtype is None
        if infers and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()
        if _has_sums(group):
            sum_late_gradients(group)


def _has_sums(group: FSDPParamGroup) -> bool:
    """Return whether micro-batches have left gradients in the dtype of reduction."""
    return any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params)


def sum_late_gradients(group: FSDPParamGroup) -> None:
    """Let the first gradient of a parameter join the sums that others of `group` have.

    torch reduces the gradients of a unit in one dtype, and converts one only where a micro-batch
    ends that reduces nothing.
    """
    for parameter in group.fsdp_params:
        gathered = parameter._unsharded_param
        late = parameter.sharded_param.requires_grad and not gathered._post_accumulate_grad_hooks
        if late and parameter.unsharded_accumulated_grad is None:
            gathered.requires_grad_(True)  # as the next all-gather does

            def convert(_: torch.Tensor, own: FSDPParam = parameter) -> None:
                if own.unsharded_accumulated_grad is None and _has_sums(group):
                    own.to_accumulated_grad_if_needed()

            gathered.register_post_accumulate_grad_hook(convert)


Resharding = list[tuple["FSDPParamGroup", "FSDPMeshInfo | None"]]


def keep_unsharded(model: torch.nn.Module) -> Resharding:
    """Let no unit of `model` reshard after its forward pass; return their settings before.

    torch's `set_reshard_after_forward` cannot bring back a group of some of the ranks.
    """
    before = [(group, group.post_forward_mesh_info) for group in param_groups([model])]
    for group, _ in before:
        group.post_forward_mesh_info = None
    return before


def restore_resharding(before: Resharding) -> None:
    """Undo `keep_unsharded`."""
    for group, mesh_info in before:
        group.post_forward_mesh_info = mesh_info


def mesh_infos(models: Models) -> Iterator[DataParallelMeshInfo]:
    """Yield the mesh infos that FSDP2 keeps for each unit."""
    for group in param_groups(models):
        infos = (group.mesh_info, group.post_forward_mesh_info)
        yield from (info for info in infos if info is not None)


# -- meshes and DTensors -------------------------------------------------------------------


def clear_process_groups(mesh: DeviceMesh) -> None:
    """Clear the process groups that the root of `mesh` keeps by name.

    There are root meshes from torch 2.10 on, and such a table from 2.11.
    """
    if hasattr(mesh, "_get_root_mesh"):
        registry = getattr(mesh._get_root_mesh(), "_pg_registry", None)
        if registry is not None:
            registry.clear()


def ring_attention(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: Collection[torch.Tensor],
) -> AbstractContextManager[None]:
    """Return torch's context of ring attention over parts of sequences, on GPUs."""
    from torch.distributed.tensor.experimental import context_parallel

    return context_parallel(
        mesh,
        buffers=list(buffers),
        buffer_seq_dims=list(dims),
        no_restore_buffers=set(no_restore),
    )


def clear_mesh_caches() -> None:
    """Clear the caches of DTensor by mesh: an equal mesh of a later run has other process groups.

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


def local_sizes_and_offsets(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[tuple[int, int]]:
    """Return this rank's (size, offset) along each dim of a tensor."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return list(zip(sizes, offsets, strict=True))


# -- modules, policies, gradients ----------------------------------------------------------


def checkpoint_activations(module: torch.nn.Module) -> None:
    """Let the backward pass of `module` recompute its activations, without a wrapper."""
    checkpoint(module)


Table = dict[str, torch.Tensor | None]


def parameter_table(module: torch.nn.Module) -> Table:
    """Return the dict in which `module` registers its own parameters, to be changed in place."""
    return cast("Table", module._parameters)


def buffer_table(module: torch.nn.Module) -> Table:
    """Return the dict in which `module` registers its own buffers, to be changed in place."""
    return module._buffers


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have no data, and computing gives their shapes and dtypes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_wrap_policy(policy: object) -> bool:
    """Return whether `policy` is one of torch's policy objects."""
    return hasattr(policy, "_run_policy") and not callable(policy)


def modules_of_policy(policy: _Policy, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of `model` that `policy` wraps."""
    return list(policy._run_policy(model, set(), {}))


def gradient_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or the values of a sparse one, to be changed in place.

    The public `values` takes coalesced tensors only.
    """
    return gradient._values() if gradient.is_sparse else gradient.detach()


def unscale(gradients: list[torch.Tensor], inverse_scale: torch.Tensor) -> torch.Tensor:
    """Multiply `gradients` by `inverse_scale` in place; return a flag [], 1 if any is not finite.

    At least one gradient, all of one device and dtype; `inverse_scale` [1].
    """
    device = gradients[0].device
    found_inf = torch.zeros((), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale.to(device))
    return found_inf
