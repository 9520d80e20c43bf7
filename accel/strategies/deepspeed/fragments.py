"""Fragments: where ZeRO keeps the full-precision value of each parameter, in memory or on disk.

An engine's optimizer steps flat tensors. A `ParameterFragment` locates the part of a parameter in
them that this rank steps. Weights and optimizer state are gathered and written through fragments,
for every stage alike; DeepSpeed's own functions need a step first, and cannot set parameters whose
size the number of ranks does not divide.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#modifying-partitioned-states
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from accel.machine.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from accel.comm.base import Communicator

Groups = Sequence[Sequence[torch.nn.Parameter]]


@final
@dataclass(frozen=True)
class ParameterFragment:
    """The fragment of a parameter that this rank steps.

    Attributes:
        flat: [n] the tensor that the optimizer steps, with fragments of other parameters.
        start: where the fragment begins in `flat`.
        length: its number of elements; 0: this rank has none.
        offset: where it begins in the flattened parameter.
        shape: of the full parameter.
        sharded: whether other ranks hold other fragments.
        sub_group: index of the optimizer state that `SwappedState.fetch` reads first; None: it is
            in memory.
    """

    flat: torch.Tensor
    start: int
    length: int
    offset: int
    shape: tuple[int, ...]
    sharded: bool
    sub_group: int | None = None

    def gather(self, flat: torch.Tensor, comm: Communicator) -> torch.Tensor:
        """Return the full parameter from the fragments of all ranks, on the host.

        `flat` [n] is `self.flat`, or state of the optimizer for it.
        """
        full = torch.zeros(math.prod(self.shape), dtype=flat.dtype)
        own = flat.detach().view(-1)[self.start : self.start + self.length]
        full[self.offset : self.offset + self.length] = own.cpu()
        if self.sharded:
            device = getattr(comm, "device", torch.device("cpu"))
            full = comm.all_reduce(full.to(device), "sum").cpu()
        return full.view(self.shape)

    def write(self, full: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy this rank's fragment of a full parameter to its place in `flat`."""
        own = full.detach().reshape(-1)[self.offset : self.offset + self.length]
        with torch.no_grad():
            flat.view(-1)[self.start : self.start + self.length].copy_(own)


Fragments = dict[int, ParameterFragment]  # by the parameter's identity


def fragments(engine: DeepSpeedEngine) -> Fragments:
    """Return the fragment of each trained parameter of an engine, by the parameter's identity."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _of_stage_3(optimizer)
    basic = engine.basic_optimizer
    for name in ("bit16_groups", "bf16_groups"):  # stages 1 and 2; bf16 accumulated in fp32
        if hasattr(optimizer, name):
            return _of_partitions(getattr(optimizer, name), basic)
    if hasattr(optimizer, "fp32_groups_flat"):
        return _of_flat_groups(optimizer.fp16_groups, optimizer.fp32_groups_flat)
    if hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        both = [pair for low, high in pairs for pair in zip(low, high, strict=True)]
        return {id(low): _unsharded(high) for low, high in both}
    return {id(p): _unsharded(p) for group in basic.param_groups for p in group["params"]}


def _unsharded(tensor: torch.Tensor) -> ParameterFragment:
    return ParameterFragment(tensor, 0, tensor.numel(), 0, tuple(tensor.shape), sharded=False)


def _of_partitions(groups: Groups, basic: torch.optim.Optimizer) -> Fragments:
    found = {}
    for group, stepped in zip(groups, basic.param_groups, strict=True):
        (flat,) = stepped["params"]
        for parameter in group:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            start = length = offset = 0
            if mapping is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                start, length, offset = here.start, here.numel, there.start
            found[id(parameter)] = ParameterFragment(
                flat, start, length, offset, tuple(parameter.shape), sharded=True
            )
    return found


def _of_stage_3(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Fragments:
    found = {}
    for group in optimizer.fp16_groups:
        for parameter in group:
            index, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            offset = size * optimizer._get_param_partition_rank(parameter)
            length = max(0, min(size, parameter.ds_numel - offset))
            flat = optimizer.fp32_partitioned_groups_flat[index]
            found[id(parameter)] = ParameterFragment(
                flat, start, length, offset, tuple(parameter.ds_shape), True, sub_group=index
            )
    return found


def _of_flat_groups(groups: Groups, flats: Sequence[torch.Tensor]) -> Fragments:
    found = {}
    for group, flat in zip(groups, flats, strict=True):
        start = 0
        for parameter in group:
            size, shape = parameter.numel(), tuple(parameter.shape)
            found[id(parameter)] = ParameterFragment(flat, start, size, 0, shape, sharded=False)
            start += size
    return found


def undo_first_step(engine: DeepSpeedEngine) -> None:
    """Undo the step on zero gradients that half precision without ZeRO starts with.

    It decays weights, and puts Adam's bias correction one step ahead.
    """
    kinds = ("fp32_groups", "fp32_groups_flat")
    if not any(hasattr(engine.optimizer, name) for name in kinds) or engine.zero_optimization():
        return
    found = fragments(engine)
    for parameter in engine.module.parameters():
        if id(parameter) in found:
            found[id(parameter)].write(parameter, found[id(parameter)].flat)
    engine.basic_optimizer.state.clear()
    for group in engine.basic_optimizer.param_groups:
        group.pop("step", None)  # where DeepSpeed's own kernels count


def share_weights(engine: DeepSpeedEngine) -> None:
    """Let stage 3 in fp32 step the weights themselves instead of a copy of them.

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
        # None and empty ones are on disk; offloaded ones may be on another device.
        if weights is None or weights.numel() != stepped.numel():
            continue
        if (weights.dtype, weights.device) == (stepped.dtype, stepped.device):
            stepped.data = weights.data


# -- on disk -------------------------------------------------------------------------------


@final
class SwappedState:
    """Optimizer state that an engine swaps to disk, one sub-group of it in memory at a time.

    Within its context, `fetch` reads a sub-group, which another one or the end replaces. Has no
    effect for an engine that swaps nothing, or any other module. Raises `CheckpointError` if the
    engine prefetches sub-groups while it steps.

    Source: https://www.deepspeed.ai/tutorials/zero/#offloading-to-cpu-and-nvme-with-zero-infinity
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        optimizer = getattr(engine, "optimizer", None)
        self._optimizer = optimizer if getattr(optimizer, "swap_optimizer", False) else None
        self._sub_group: int | None = None
        self._changed = False
        swapper = getattr(self._optimizer, "optimizer_swapper", None)
        if hasattr(swapper, "async_swap_in"):
            value = "state under offload to nvme with pipeline_read or pipeline_write"
            rule = "prefetched sub-groups cannot be gathered"
            raise CheckpointError(Problem(value, rule, "Switch both off."))

    def __enter__(self) -> SwappedState:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def fetch(self, sub_group: int | None, change: bool = False) -> None:
        """Have a sub-group (None: it always is) in memory until the next call.

        `change`: whether it is written back.
        """
        if self._optimizer is None or sub_group is None:
            return
        if sub_group != self._sub_group:
            self._release()
            if not self._optimizer._swappable_optimizer_subgroup(sub_group):
                return
            self._optimizer._optimizer_states_and_gradient_swap_in(sub_group)
            self._sub_group = sub_group
        self._changed = self._changed or change

    def clear(self) -> None:
        """Drop the optimizer's state on disk; the weights that it steps stay."""
        if self._optimizer is not None:
            self._release()
            self._optimizer.optimizer_swapper.purge_state()

    def _release(self) -> None:
        if self._sub_group is None or self._optimizer is None:
            return
        if self._changed:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._sub_group)
        else:
            self._optimizer._release_swap_buffers(self._sub_group)
        self._sub_group, self._changed = None, False
