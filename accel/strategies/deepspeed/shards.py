"""Where ZeRO keeps the full-precision value of each parameter: whole tensors out of it, and back.

An engine's optimizer steps flat tensors. A `Piece` says which part of which of them belongs to a
parameter on this rank. All else (weights, state of the optimizer) follows from that, for every
stage alike; DeepSpeed's own functions for it want a step to be made before, and cannot set
parameters that do not divide by the number of processes.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#modifying-partitioned-states
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel.checkpoint.optimizer_state import FORMAT_VERSION, ParameterNames, misfit
from accel.memory_estimate import Footprint, num_bytes, state_bytes
from accel.strategies.deepspeed.disk import Disk

if TYPE_CHECKING:
    from accel.comm.base import Communicator


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that this rank steps.

    Attributes:
        flat: [n] what the optimizer steps; it holds other parameters' parts, too.
        start: where the part begins in `flat`.
        length: its number of elements; 0: this rank has none.
        offset: where it begins in the flattened parameter.
        shape: of the whole parameter.
        sharded: whether other ranks hold other parts.
        part: index of what `Disk.fetch` reads before `flat` is looked at; None: it is in memory.
    """

    flat: torch.Tensor
    start: int
    length: int
    offset: int
    shape: tuple[int, ...]
    sharded: bool
    part: int | None = None

    def whole(self, flat: torch.Tensor, comm: Communicator) -> torch.Tensor:
        """Return the parameter's part of `flat`, of all ranks together, on the host."""
        full = torch.zeros(math.prod(self.shape), dtype=flat.dtype)
        own = flat.detach().view(-1)[self.start : self.start + self.length]
        full[self.offset : self.offset + self.length] = own.cpu()
        if self.sharded:
            full = comm.all_reduce(full.to(comm_device(comm)), "sum").cpu()
        return full.view(self.shape)

    def put(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy this rank's part of a `whole` parameter to its place in `flat`."""
        own = whole.detach().reshape(-1)[self.offset : self.offset + self.length]
        with torch.no_grad():
            flat.view(-1)[self.start : self.start + self.length].copy_(own)


def comm_device(comm: Communicator) -> torch.device:
    """Return where tensors lie that `comm` moves."""
    return getattr(comm, "device", torch.device("cpu"))


def pieces(engine: Any) -> dict[int, Piece]:
    """Return where each trained parameter of `engine` is stepped, by its identity."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _of_stage_3(optimizer)
    basic = engine.basic_optimizer
    for name in ("bit16_groups", "bf16_groups"):  # stages 1 and 2; bf16 summed up in fp32
        if hasattr(optimizer, name):
            return _of_partitions(getattr(optimizer, name), basic)
    if hasattr(optimizer, "fp32_groups_flat"):
        return _of_flat_groups(optimizer.fp16_groups, optimizer.fp32_groups_flat)
    if hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        both = [pair for low, high in pairs for pair in zip(low, high, strict=True)]
        return {id(low): _own(high) for low, high in both}
    return {id(p): _own(p) for group in basic.param_groups for p in group["params"]}


def _own(tensor: torch.Tensor) -> Piece:
    return Piece(tensor, 0, tensor.numel(), 0, tuple(tensor.shape), sharded=False)


def _of_partitions(groups: Any, basic: torch.optim.Optimizer) -> dict[int, Piece]:
    found = {}
    for group, stepped in zip(groups, basic.param_groups, strict=True):
        (flat,) = stepped["params"]
        for parameter in group:
            mapping, shape = parameter._hp_mapping, tuple(parameter.shape)
            if mapping is None:
                found[id(parameter)] = Piece(flat, 0, 0, 0, shape, sharded=True)
                continue
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            found[id(parameter)] = Piece(
                flat, here.start, here.numel, there.start, shape, sharded=True
            )
    return found


def _of_stage_3(optimizer: Any) -> dict[int, Piece]:
    found = {}
    for group in optimizer.fp16_groups:
        for parameter in group:
            index, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            offset = size * optimizer._get_param_partition_rank(parameter)
            length = max(0, min(size, parameter.ds_numel - offset))
            flat = optimizer.fp32_partitioned_groups_flat[index]
            shape = tuple(parameter.ds_shape)
            found[id(parameter)] = Piece(flat, start, length, offset, shape, True, part=index)
    return found


def _of_flat_groups(groups: Any, flats: Any) -> dict[int, Piece]:
    found = {}
    for group, flat in zip(groups, flats, strict=True):
        start = 0
        for parameter in group:
            size, shape = parameter.numel(), tuple(parameter.shape)
            found[id(parameter)] = Piece(flat, start, size, 0, shape, sharded=False)
            start += size
    return found


def undo_first_step(engine: Any) -> None:
    """Take back the step on zero gradients that half precision without ZeRO starts with.

    It decays weights, and puts Adam's correction of its moments one step ahead.
    """
    kinds = ("fp32_groups", "fp32_groups_flat")
    if not any(hasattr(engine.optimizer, name) for name in kinds) or engine.zero_optimization():
        return
    where = pieces(engine)
    for parameter in engine.module.parameters():
        if id(parameter) in where:
            where[id(parameter)].put(parameter, where[id(parameter)].flat)
    engine.basic_optimizer.state.clear()
    for group in engine.basic_optimizer.param_groups:
        group.pop("step", None)  # where DeepSpeed's own kernels count


def share_weights(engine: Any) -> None:
    """Let stage 3 in fp32 step the weights themselves, in place of a copy of them.

    DeepSpeed means to: "in such cases we don't need another copy". But it compares the weights'
    `torch.device` with a string, which is never equal, so that it always makes one. Values are
    equal when the engine is built; from then on its copy back after a step changes nothing.
    """
    optimizer = engine.optimizer
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer_Stage3" or optimizer.zenflow:
        return
    pairs = zip(
        optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
    )
    for weights, stepped in pairs:
        # None and empty ones lie on disk; offloaded ones may lie elsewhere.
        if weights is None or weights.numel() != stepped.numel():
            continue
        if (weights.dtype, weights.device) == (stepped.dtype, stepped.device):
            stepped.data = weights.data


# -- weights -------------------------------------------------------------------------------


def model_state(
    module: torch.nn.Module,
    where: dict[int, Piece],
    gather: Callable[[torch.nn.Parameter], torch.Tensor],
    comm: Communicator,
    disk: Disk,
) -> dict[str, torch.Tensor]:
    """Return the whole model's tensors by name, trained ones in the optimizer's own precision.

    Args:
        module: the user's own.
        where: the pieces of its trained parameters.
        gather: returns the whole of another parameter that is sharded.
        comm: how this process talks to the others.
        disk: holds what the engine has there.
    """
    done: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            state[name] = value
            continue
        key = id(value)
        if key not in done:
            if key in where:
                disk.fetch(where[key].part)
                done[key] = where[key].whole(where[key].flat, comm)
            elif hasattr(value, "ds_id") and isinstance(value, torch.nn.Parameter):
                done[key] = gather(value)
            else:
                done[key] = value.detach().clone()
        state[name] = done[key]
    return state


def load_model_state(
    module: torch.nn.Module,
    state: dict[str, torch.Tensor],
    where: dict[int, Piece],
    write: Callable[[torch.nn.Parameter, torch.Tensor], None],
    strict: bool,
    disk: Disk,
) -> None:
    """Load what `model_state` returned.

    Args:
        module: the user's own.
        state: whole tensors by name.
        where: the pieces of its trained parameters.
        write: copies a whole tensor into a parameter, sharded or not.
        strict: whether every name must match.
        disk: holds what the engine has there.

    Raises:
        RuntimeError: naming what does not fit, as torch does.
    """
    live = module.state_dict(keep_vars=True)
    wrong = [f"missing {n}" for n in live if n not in state] if strict else []
    wrong += [f"unexpected {n}" for n in state if n not in live] if strict else []
    both = {n: v for n, v in live.items() if n in state and isinstance(v, torch.Tensor)}
    for name, value in both.items():
        shape = tuple(getattr(value, "ds_shape", value.shape))
        if shape != tuple(state[name].shape):
            wrong.append(f"{name} has shape {tuple(state[name].shape)}, not {shape}")
    if wrong:
        raise RuntimeError(", ".join(wrong))
    for name, value in both.items():
        if isinstance(value, torch.nn.Parameter):
            write(value, state[name])
            if id(value) in where:
                disk.fetch(where[id(value)].part, change=True)
                where[id(value)].put(state[name], where[id(value)].flat)
        else:
            value.copy_(state[name])


# -- optimizer -----------------------------------------------------------------------------


def optimizer_state(
    basic: torch.optim.Optimizer,
    groups: list[list[torch.nn.Parameter]],
    where: dict[int, Piece],
    names: ParameterNames,
    comm: Communicator,
    disk: Disk,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, in whole tensors.

    Args:
        basic: what steps the flat tensors.
        groups: the parameters of each group, as they were before the engine took them.
        where: their pieces.
        names: their names.
        comm: how this process talks to the others.
        disk: holds what the engine has there.
        extra: what else is saved with it.
    """
    keys = _keys(groups, names)
    state = {}
    for parameter in (p for group in groups for p in group):
        piece = where.get(id(parameter))
        stepped = None if piece is None else basic.state.get(piece.flat)
        if piece is not None and stepped:
            disk.fetch(piece.part)
            state[keys[id(parameter)]] = {
                name: piece.whole(value, comm) if _is_flat(value, piece.flat) else _copy(value)
                for name, value in stepped.items()
            }
    return {
        "format": FORMAT_VERSION,
        "param_groups": [
            {k: v for k, v in live.items() if k not in ("params", "param_names")}
            | {"params": [keys[id(p)] for p in group]}
            for group, live in zip(groups, basic.param_groups, strict=True)
        ],
        "state": state,
        "other_state": {},
        "unnamed": [key for key in keys.values() if key.startswith("#")],
        "extra": extra,
    }


def load_optimizer_state(
    basic: torch.optim.Optimizer,
    groups: list[list[torch.nn.Parameter]],
    where: dict[int, Piece],
    saved: dict[str, Any],
    names: ParameterNames,
    disk: Disk,
) -> None:
    """Load what `optimizer_state` returned.

    Raises:
        CheckpointError: if it was saved of other parameters or groups, or of another format.
    """
    if not isinstance(saved, dict) or saved.get("format") != FORMAT_VERSION:
        raise misfit("another format", f"this version reads {FORMAT_VERSION}")
    keys = _keys(groups, names)
    ours = [{keys[id(p)] for p in group} for group in groups]
    theirs = [{names.canonical(key) for key in group["params"]} for group in saved["param_groups"]]
    if ours != theirs:
        raise misfit("its parameter groups", "they hold other parameters than the saved ones")
    for live, group in zip(basic.param_groups, saved["param_groups"], strict=True):
        live.update({k: v for k, v in group.items() if k not in ("params", "param_names")})
    by_key = {names.canonical(key): value for key, value in saved["state"].items()}
    disk.forget_state()
    basic.state.clear()
    for parameter in (p for group in groups for p in group):
        piece, values = where.get(id(parameter)), by_key.get(keys[id(parameter)])
        if piece is not None and values:
            disk.fetch(piece.part, change=True)
            _put_state(basic, piece, values, keys[id(parameter)])


def _put_state(
    basic: torch.optim.Optimizer, piece: Piece, values: dict[str, Any], key: str
) -> None:
    stepped = basic.state[piece.flat]
    for name, value in values.items():
        whole = isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape
        if whole and not (value.dim() == 0 and name == "step"):
            if name not in stepped:
                stepped[name] = torch.zeros_like(piece.flat, dtype=value.dtype)
            piece.put(value, stepped[name])
            continue
        if name in stepped and float(stepped[name]) != float(value):
            rule = "ZeRO keeps one for all parameters of a group, and the saved ones differ"
            raise misfit(f"{name}={float(value)} of {key}", rule)
        stepped[name] = _scalar(basic, value)


def _scalar(basic: torch.optim.Optimizer, value: Any) -> Any:
    """Return a count of steps as the optimizer keeps it: torch's in tensors, DeepSpeed's not."""
    if type(basic).__module__.startswith("deepspeed"):
        return int(value)
    return _copy(value) if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _keys(groups: list[list[torch.nn.Parameter]], names: ParameterNames) -> dict[int, str]:
    flat = {id(p): p for group in groups for p in group}
    return {key: names.key(p, position) for position, (key, p) in enumerate(flat.items())}


# -- memory --------------------------------------------------------------------------------


def footprint(parameters: Sequence[torch.nn.Parameter], optimizers: Sequence[Any]) -> Footprint:
    """Return the bytes of an engine's tensors on this process.

    Args:
        parameters: of its model.
        optimizers: its `DeepSpeedOptimizer`, or none.
    """
    held = num_bytes(getattr(p, "ds_tensor", p) for p in parameters)
    # What is too small to be worth fetching stays whole beside its parts, from the first pass on.
    whole: list[Any] = [p for p in parameters if getattr(p, "ds_persist", False)]
    held += sum(p.ds_numel * p.element_size() for p in whole if p.ds_tensor.numel() < p.ds_numel)
    if not optimizers:
        return Footprint(held, 0, 0)
    (optimizer,) = optimizers
    own = {getattr(p, "ds_tensor", p).data_ptr() for p in parameters}
    where = pieces(optimizer.engine).values()
    stepped = list({id(piece.flat): piece.flat for piece in where}.values())
    copies = num_bytes(flat for flat in stepped if flat.data_ptr() not in own)
    state = state_bytes(optimizer.optimizer, stepped)
    return Footprint(
        held,
        _gradient_bytes(parameters, optimizer.engine),
        None if state is None else state + copies,
    )


def _gradient_bytes(parameters: Sequence[torch.nn.Parameter], engine: Any) -> int:
    """Return the bytes of gradients in the format of the weights; from stage 2 on, of one part."""
    stage = engine.zero_optimization_stage()
    trained = [p for p in parameters if p.requires_grad]
    if stage >= 2:
        where = pieces(engine)
        return sum(where[id(p)].length * p.element_size() for p in trained if id(p) in where)
    return num_bytes(trained)
