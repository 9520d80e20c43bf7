"""Whole parameters beside split matrices: ranks of one replica step them by the same gradients.

A whole parameter that is used among split activations (a gain of each head, say) gets a part of its
gradient on each rank: it is summed where the plan says so, and found out where it does not.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from accel.config.tensor_parallel import SUMMED
from accel.errors import ConfigError, Problem
from accel.memory_estimate import local
from accel.strategies.mesh.device_mesh import TENSOR

if TYPE_CHECKING:
    from accel.comm.base import Communicator

# Equal computations differ by rounding, where the order of sums is not fixed; parts of a gradient
# differ by as much as they are large. What is next to nothing may be rounding alone.
MOST_DIFFERENT, NEXT_TO_NOTHING = 0.1, 1e-6


def sum_gradients(owner: torch.nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Sum the gradient of a whole parameter over the ranks, in each backward pass.

    Args:
        owner: holds the parameter, and uses it in its forward pass.
        name: of the parameter, in `owner`.
        mesh: 1-D, the axis of tensor parallelism.
    """

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        parameter = module._parameters[name]  # its own, or what FSDP2 gathered
        assert parameter is not None
        same = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
        # Found before the parameter of that name, which stays in its place.
        module.__dict__[name] = same.to_local(grad_placements=[Partial()])

    def leave(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        module.__dict__.pop(name, None)

    owner.register_forward_pre_hook(enter)
    owner.register_forward_hook(leave, always_call=True)


def check_first_step(
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    comm: Communicator,
    names: Callable[[], Mapping[int, str]],
) -> None:
    """Let the first step of `optimizer` raise if whole parameters have unequal gradients.

    Args:
        optimizer: of torch.
        mesh: of the run; nothing is compared if it splits no matrices.
        comm: how all ranks talk, so that they raise together.
        names: returns the parameters' names by their id.

    Raises:
        ConfigError: in that step, naming them.
    """
    if TENSOR not in (mesh.mesh_dim_names or ()):
        return
    waiting = [True]

    def compare(own: torch.optim.Optimizer, *_: Any) -> None:
        if waiting:
            waiting.clear()
            unequal = _unequal(list(_whole_parameters(own)), mesh[TENSOR], comm)
            if unequal:
                known = names()
                raise ConfigError(_apart([known.get(id(p), str(tuple(p.shape))) for p in unequal]))

    optimizer.register_step_pre_hook(compare)


def _whole_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the trained parameters of which the ranks of a replica hold the same."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            axes = () if mesh is None else mesh.mesh_dim_names or ()
            if parameter.requires_grad and TENSOR not in axes:
                yield parameter


@torch.no_grad()
def _unequal(
    parameters: list[torch.Tensor], mesh: DeviceMesh, comm: Communicator
) -> list[torch.Tensor]:
    """Return those whose gradients are not those of the first rank of the replica, in any replica.

    Every rank calls this with as many parameters; no gradient counts as zeros.
    """
    if not parameters:
        return []
    sizes = torch.stack([_sizes(parameter, mesh) for parameter in parameters]).nan_to_num(0.0, 0.0)
    largest, difference = sizes.unbind(1)
    apart = difference > MOST_DIFFERENT * largest.clamp(min=NEXT_TO_NOTHING * largest.max())
    found = comm.all_reduce(apart.int(), "max").tolist()
    return [parameter for parameter, is_apart in zip(parameters, found, strict=True) if is_apart]


def _sizes(parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return [2]: the norm of a gradient, and that of its difference from the first rank's."""
    own = local(parameter if parameter.grad is None else parameter.grad).detach()
    own = own.to_dense().to(mesh.device_type)
    if parameter.grad is None:
        own = torch.zeros_like(own)
    first = own.clone(memory_format=torch.contiguous_format)
    dist.broadcast(first, group=mesh.get_group(), group_src=0)
    return torch.stack([torch.maximum(own.norm(), first.norm()), (own - first).norm()]).float()


def _apart(names: list[str]) -> Problem:
    most = 8
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))
    return Problem(
        f"optimizer.step: gradients of {shown} that differ between the processes of tp",
        "replicated parameters must receive identical gradients on every rank of the tp group",
        f"Give them the style {SUMMED!r} in tp_plan if split activations flow through them (each "
        "process then has a part of the gradient); if the model draws at random (dropout), seed "
        "the processes of a replica alike: set_seed(seed).",
    )
