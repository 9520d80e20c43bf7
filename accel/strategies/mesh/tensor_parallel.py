"""Tensor parallelism: weights sharded over the ranks of a replica, as a plan of patterns says.

A replicated parameter that is used among sharded activations (a gain of each head, say) gets a part
of its gradient on each rank. The parts are summed where the plan says so, and detected at the first
step where it does not.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from accel.config.tensor_parallel import ALIASES, SUMMED, plan_problems
from accel.machine.errors import ConfigError, Problem, listed, nearest
from accel.machine.memory import local
from accel.plan.dims import PP, TP
from accel.precision.amp import parameters_of
from accel.precision.wrapping import own_module, plain_name
from accel.strategies.mesh.parameters import Named, parameters_by_name
from accel.strategies.mesh.stages import is_dropped
from accel.strategies.mesh.torch_internals import Models, parameter_table

Plan = Mapping[str, str | ParallelStyle]
# Equal computations differ by rounding, where the order of sums is not fixed; parts of a gradient
# differ by as much as they are large. A gradient near zero may be rounding only.
RELATIVE_TOLERANCE, NEAR_ZERO = 0.1, 1e-6


def apply_tensor_parallel(
    model: torch.nn.Module, mesh: DeviceMesh, plan: Plan | None = None
) -> None:
    """Shard the modules of `model` that a tensor-parallel plan names, in place.

    Every rank holds the same weights before, so that nothing is communicated.

    Args:
        model: on the device.
        mesh: 1-D, the tensor-parallel axis.
        plan: pattern → style; None: the model's own.

    Raises:
        ConfigError: if there is no plan, a pattern names no module, or tied weights would be
            sharded differently.
    """
    styles, summed = resolve_plan(model, plan)
    before = parameters_by_name(model)
    for name, style in styles.items():
        style.src_data_rank = None
        if not is_dropped(model.get_submodule(name)):
            parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    _tie_weights(model, before)
    for name in summed:
        owner, _, attribute = name.rpartition(".")
        if not is_dropped(model.get_submodule(owner)):
            sum_gradients(model.get_submodule(owner), attribute, mesh)


def resolve_plan(
    model: torch.nn.Module, plan: Plan | None = None
) -> tuple[dict[str, ParallelStyle], list[str]]:
    """Return the style of each module that a plan names, and parameters with summed gradients.

    Args:
        model: the model; `torch.compile` of it or of its modules does not change names.
        plan: pattern → style; None: ``model.tp_plan``, else ``model._tp_plan``.

    Raises:
        ConfigError: naming every pattern that matches no module.
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
            rule = "no module of the model has this name"
            problems.append(Problem(f"{where}[{pattern!r}]", rule, nearest(pattern, known)))
        elif style == SUMMED:
            inside = (n for n in parameters if any(f"{n}.".startswith(f"{m}.") for m in matches))
            summed += [parameters[name] for name in inside]
        else:
            styles.update({modules[name]: _style(style) for name in matches})
    ConfigError.raise_if(problems)
    return styles, list(dict.fromkeys(summed))


def _by_plain_name(names: Iterable[str]) -> dict[str, str]:
    """Return names by those without `torch.compile`; of two that coincide, the inner one."""
    return {plain: name for name in names if (plain := plain_name(name))}


def _own_plan(model: torch.nn.Module) -> Plan:
    """Return the plan that a model defines itself."""
    own = own_module(model)
    plan: Plan | None = getattr(own, "tp_plan", None) or getattr(own, "_tp_plan", None)
    if not plan:
        raise ConfigError.of(
            f"tensor parallelism of {type(own).__name__}",
            "neither the model nor the plugin has a tp_plan",
            "Give TorchTensorParallelPlugin(tp_plan={'layers.*.up': 'colwise', …}).",
        )
    return plan


def _matches(name: str, pattern: str) -> bool:
    """Return whether `name` matches `pattern`, where ``*`` stands for one part between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _style(style: str | ParallelStyle) -> ParallelStyle:
    """Return the style of one module; torch's styles are not shared between modules."""
    if isinstance(style, ParallelStyle):
        return style
    known: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    return known[ALIASES.get(style, style)]()


def _tie_weights(model: torch.nn.Module, before: Named) -> None:
    """Tie the sharded parameters that were tied in `before`."""
    firsts: dict[int, str] = {}
    for name, old in before.items():
        first = firsts.setdefault(id(old), name)
        if first == name:
            continue
        kept, other = model.get_parameter(first), model.get_parameter(name)
        if kept is other:
            continue
        if _layout(kept) != _layout(other):
            raise ConfigError.of(
                f"tp_plan: {plain_name(first)} and {plain_name(name)} are one parameter",
                "tied weights are sharded alike",
                "Give both modules styles that shard the weight alike (rowwise_rep for an "
                "embedding, colwise_rep for the output), or remove both.",
            )
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, kept)


def _layout(parameter: torch.nn.Parameter) -> tuple[Placement, ...] | None:
    return parameter.placements if isinstance(parameter, DTensor) else None


# -- gradients of replicated parameters ----------------------------------------------------


def sum_gradients(owner: torch.nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Sum the gradient of a replicated parameter over a 1-D tensor-parallel mesh, in each backward.

    `owner` registers the parameter `name`, and uses it in its forward pass.
    """

    def enter(module: torch.nn.Module, inputs: object) -> None:
        parameter = parameter_table(module)[name]  # at present, as FSDP2 may have gathered it
        if parameter is not None:
            same = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
            # An attribute of the instance hides the parameter of that name, which stays registered.
            module.__dict__[name] = same.to_local(grad_placements=[Partial()])

    def leave(module: torch.nn.Module, inputs: object, outputs: object) -> None:
        module.__dict__.pop(name, None)

    owner.register_forward_pre_hook(enter)
    owner.register_forward_hook(leave, always_call=True)


def check_first_step(
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    models: Models,
) -> None:
    """Let the first step of `optimizer` raise if gradients of replicated parameters differ.

    All ranks of a pipeline stage raise together. Nothing is compared without a tensor-parallel
    axis. `models` give the names of parameters, as they are at that step.
    """
    if TP not in (mesh.mesh_dim_names or ()) or mesh[TP].size() == 1:
        return
    waiting = [True]

    def compare(own: torch.optim.Optimizer, *_: object) -> None:
        if waiting:
            waiting.clear()
            unequal = _unequal(list(_replicated_parameters(own)), mesh)
            if unequal:
                raise ConfigError(_unequal_problem(unequal, models))

    optimizer.register_step_pre_hook(compare)


def _replicated_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the trainable parameters that are replicated over the tensor-parallel ranks."""
    for parameter in parameters_of(optimizer):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        axes = () if mesh is None else mesh.mesh_dim_names or ()
        if parameter.requires_grad and TP not in axes:
            yield parameter


@torch.no_grad()
def _unequal(parameters: list[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return those whose gradients differ from those of the first tensor-parallel rank.

    A difference in one replica counts for all. Every rank of a pipeline stage calls this with as
    many parameters; a missing gradient counts as zeros.
    """
    if not parameters:
        return []
    sizes = torch.stack([_sizes(parameter, mesh[TP]) for parameter in parameters]).nan_to_num(
        0.0, 0.0
    )
    largest, difference = sizes.unbind(1)
    differs = difference > RELATIVE_TOLERANCE * largest.clamp(min=NEAR_ZERO * largest.max())
    found = differs.int()
    for axis in mesh.mesh_dim_names or ():
        if axis != PP:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return [one for one, flag in zip(parameters, found.tolist(), strict=True) if flag]


def _sizes(parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return [2]: the norm of a gradient, and that of its difference from the first rank's."""
    own = local(parameter if parameter.grad is None else parameter.grad).detach()
    own = own.to_dense().to(mesh.device_type)
    if parameter.grad is None:
        own = torch.zeros_like(own)
    first = own.clone(memory_format=torch.contiguous_format)
    dist.broadcast(first, group=mesh.get_group(), group_src=0)
    return torch.stack([torch.maximum(own.norm(), first.norm()), (own - first).norm()]).float()


def _unequal_problem(parameters: list[torch.Tensor], models: Models) -> Problem:
    known = {id(p): name for model in models for name, p in model.named_parameters()}
    names = [known.get(id(p), str(tuple(p.shape))) for p in parameters]
    return Problem(
        f"optimizer.step: gradients of {listed(names)} that differ between the ranks of tp",
        "replicated parameters must receive identical gradients on every rank of the tp group",
        f"Give them the style {SUMMED!r} in tp_plan if sharded activations flow through them (each "
        "rank then has a part of the gradient); if the model draws at random (dropout), seed "
        "the ranks of a replica alike: set_seed(seed).",
    )
