"""Parameters before they are sharded: their memory and values, and what replaces them.

Optimizers are remapped from the parameters that a model had to the DTensors that replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel.comm.base import exchange_flat
from accel.machine.errors import ConfigError
from accel.optimizer import unwrap_optimizer
from accel.strategies.mesh.state import shard_like
from accel.strategies.mesh.torch_internals import buffer_table, parameter_table

if TYPE_CHECKING:
    from accel.comm.base import Communicator


Named = dict[str, torch.nn.Parameter]


def parameters_by_name(model: torch.nn.Module) -> Named:
    """Return the parameters by name, tied ones under all their names."""
    return dict(model.named_parameters(remove_duplicate=False))


class ParameterRemap:
    """Which parameter replaced which."""

    def __init__(self) -> None:
        self._new: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def record(self, before: Named, after: Named) -> None:
        """Record the parameters, by name, that replaced those of a model as the user built it."""
        for name, old in before.items():
            if old is not after[name]:
                self._new[old] = after[name]

    def record_unsharded(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record all-gathered parameters, which optimizers must not step, with their shards."""
        for unsharded, shard in pairs:
            self._new[unsharded] = shard

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter that replaced `parameter`, or itself where none did."""
        found: torch.Tensor = self._new.get(parameter, parameter)
        return found

    def remap(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of `optimizer`, prepared or not; its state is sharded alike."""
        own = unwrap_optimizer(optimizer)
        for group in own.param_groups:
            for index, old in enumerate(group["params"]):
                new = self._new.get(old)
                if new is None:
                    continue
                group["params"][index] = new
                if old in own.state:
                    state = own.state.pop(old)
                    own.state[new] = {key: shard_like(v, new) for key, v in state.items()}


Init = Callable[[torch.nn.Module], object]


class InitialWeights:
    """Materializes modules with the values of rank 0, one unit of a model at a time.

    Only the unit at hand needs memory: on other ranks, the rest may be on the meta device.

    Args:
        device: where tensors on the meta device are allocated.
        init: allocates and fills the tensors of a module on the meta device; None: they are
            allocated and receive the values of rank 0.
        sync: whether all ranks receive the values of rank 0, or keep their own.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        init: Init | None = None,
        sync: bool = True,
    ) -> None:
        self._comm = comm
        self._device = device
        self._init = init
        self._sync = sync
        self._done: dict[int, torch.Tensor] = {}
        # By id of a tensor on the meta device: itself, and the materialized one.
        self._materialized: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def check(self, model: torch.nn.Module) -> None:
        """Raise on every rank if any of them has tensors that nothing would fill."""
        tensors = (*model.parameters(), *model.buffers())
        lacking = self._comm.all_gather_object(any(tensor.is_meta for tensor in tensors))
        if self._init is not None:
            return
        ranks = [rank for rank, lacks in enumerate(lacking) if lacks]
        if 0 in ranks:
            raise ConfigError.of(
                "prepare: a model on the meta device on rank 0",
                "the other ranks receive its weights",
                "Build the model with weights on rank 0, or give param_init_fn.",
            )
        if ranks and not self._sync:
            raise ConfigError.of(
                f"sync_module_states=False with a model on the meta device on ranks {ranks}",
                "such a rank receives its weights from rank 0",
                "Omit sync_module_states.",
            )

    def materialize(self, module: torch.nn.Module) -> None:
        """Allocate and fill the tensors of `module` that were not materialized before."""
        if self._init is not None:
            for owner in module.modules():
                self._initialize(owner, self._init)
        tensors = [tensor for tensor in self._allocated(module) if not isinstance(tensor, DTensor)]
        if self._sync and self._comm.world_size > 1:
            self._receive(tensors)

    @torch.no_grad()
    def _receive(self, tensors: list[torch.Tensor]) -> None:
        # On one device of this rank: there is one broadcast for each device and dtype.
        sent = [tensor.detach().to(tensors[0].device) for tensor in tensors]
        received = exchange_flat(sent, self._comm.broadcast)
        for tensor, values in zip(tensors, received, strict=True):
            tensor.copy_(values[0])

    def _initialize(self, owner: torch.nn.Module, init: Init) -> None:
        """Let `init` fill the tensors that `owner` itself registers; tied ones stay tied."""
        tables = (parameter_table(owner), buffer_table(owner))
        before = [(t, n, v) for t in tables for n, v in t.items() if v is not None and v.is_meta]
        if not before:
            return
        init(owner)
        for table, name, old in before:
            new = table[name]
            if new is not None:
                table[name] = self._materialized.setdefault(id(old), (old, new))[1]

    def _allocated(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        """Yield each new tensor once it has memory; tied ones stay tied."""
        for owner in module.modules():
            for table in (parameter_table(owner), buffer_table(owner)):
                for name, tensor in table.items():
                    if tensor is None or isinstance(tensor, DTensor):
                        continue
                    if tensor.is_meta:
                        if id(tensor) not in self._materialized:
                            self._materialized[id(tensor)] = (tensor, self._allocate(tensor))
                        table[name] = tensor = self._materialized[id(tensor)][1]
                    if id(tensor) not in self._done:
                        self._done[id(tensor)] = tensor
                        yield tensor

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        allocated = torch.empty_like(tensor, device=self._device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(allocated, requires_grad=tensor.requires_grad)
        return allocated
