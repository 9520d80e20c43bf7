"""The weights that training starts from: those of rank 0, given to a part of a model at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from accel.errors import ConfigError, Problem

if TYPE_CHECKING:
    from accel.comm.base import Communicator


class InitialWeights:
    """Gives modules their device memory and the values of rank 0.

    Only the module in hand needs memory: what other ranks hold may be on the meta device until its
    turn comes.

    Args:
        comm: how ranks talk.
        device: where tensors on the meta device are allocated.
        init: allocates and fills the tensors of a module on the meta device; None: they are
            allocated and get the values of rank 0.
        sync: whether values are those of rank 0, or each rank's own.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        init: Callable[[torch.nn.Module], Any] | None = None,
        sync: bool = True,
    ) -> None:
        self._comm = comm
        self._device = device
        self._init = init
        self._sync = sync
        self._done: dict[int, torch.Tensor] = {}
        self._fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the first

    def check(self, model: torch.nn.Module) -> None:
        """Raise on every rank if any lacks weights that nobody gives it.

        Raises:
            ConfigError: if rank 0 is on the meta device, or another one that gets none from it.
        """
        tensors = (*model.parameters(), *model.buffers())
        lacking = self._comm.all_gather_object(any(tensor.is_meta for tensor in tensors))
        if self._init is not None:
            return
        ranks = [rank for rank, lacks in enumerate(lacking) if lacks]
        if 0 in ranks:
            raise ConfigError(
                Problem(
                    "prepare: a model on the meta device on rank 0",
                    "the other ranks start from its weights",
                    "Build the model with weights on rank 0, or give param_init_fn.",
                )
            )
        if ranks and not self._sync:
            raise ConfigError(
                Problem(
                    f"sync_module_states=False with a model on the meta device on ranks {ranks}",
                    "such a rank gets its weights from rank 0",
                    "Leave sync_module_states out.",
                )
            )

    def settle(self, module: torch.nn.Module) -> None:
        """Give the tensors of `module` that have not had their turn memory and values."""
        if self._init is not None:
            for owner in module.modules():
                self._initialise(owner, self._init)
        tensors = [tensor for tensor in self._allocated(module) if not isinstance(tensor, DTensor)]
        if self._sync and self._comm.world_size > 1:
            self._receive(tensors)

    def _initialise(self, owner: torch.nn.Module, init: Callable[[torch.nn.Module], Any]) -> None:
        """Let `init` fill what `owner` holds itself; what is shared stays so."""
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        before = [(t, n, v) for t in tables for n, v in t.items() if v is not None and v.is_meta]
        if not before:
            return
        init(owner)
        for table, name, old in before:
            table[name] = self._fresh.setdefault(id(old), (old, table[name]))[1]

    def _allocated(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        """Yield each tensor that is new, after giving it memory; shared ones stay shared."""
        for owner in module.modules():
            tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or isinstance(tensor, DTensor):
                        continue
                    if tensor.is_meta:
                        if id(tensor) not in self._fresh:
                            self._fresh[id(tensor)] = (tensor, self._allocate(tensor))
                        table[name] = tensor = self._fresh[id(tensor)][1]
                    if id(tensor) not in self._done:
                        self._done[id(tensor)] = tensor
                        yield tensor

    def _allocate(self, tensor: torch.Tensor) -> Any:
        fresh = torch.empty_like(tensor, device=self._device)
        if isinstance(tensor, torch.nn.Parameter):
            fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        return fresh

    @torch.no_grad()
    def _receive(self, tensors: Iterable[torch.Tensor]) -> None:
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            parts = self._comm.broadcast(flat).split([tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
