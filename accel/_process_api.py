"""The part of `Accelerator` that concerns processes: who runs what, and what they exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accel import ops
from accel.logging import get_logger
from accel.tree import recursively_apply

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.enums import DistributedType
    from accel.state import AcceleratorState, GradientState

Function = Callable[..., Any]
T = TypeVar("T")

logger = get_logger(__name__)


class ProcessAPI:
    """Mixin of `Accelerator`: process control and collectives."""

    state: AcceleratorState
    gradient_state: GradientState
    comm: Communicator
    device: torch.device
    _trigger: bool = False

    # -- who this is ---------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.comm.world_size

    @property
    def process_index(self) -> int:
        """The index of this process among all."""
        return self.comm.rank

    @property
    def local_process_index(self) -> int:
        """The index of this process on its node."""
        return self.comm.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.comm.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self.comm.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its node."""
        return self.comm.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest index."""
        return self.comm.rank == self.comm.world_size - 1

    # -- who runs what -------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the main process runs before the others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that each node's main process runs before the others of its node."""
        return self.state.local_main_process_first()

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs on the main process alone; others get None."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs on each node's main process alone."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs on the last process alone."""
        return self.state.on_last_process(function)

    def on_process(
        self, function: Function | None = None, process_index: int | None = None
    ) -> Function:
        """Decorate a function so that it runs on the process `process_index` alone."""
        return self.state.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """Decorate a function so that it runs on one process of each node alone."""
        return self.state.on_local_process(function, local_process_index=local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node; takes the arguments of `print`."""
        self.state.print(*args, **kwargs)

    def split_between_processes(
        self, inputs: T, apply_padding: bool = False
    ) -> AbstractContextManager[T]:
        """Return a context that gives each process its part of `inputs`.

        Args:
            inputs: a list, tuple, tensor, or a dict of such, all of one length.
            apply_padding: whether shorter parts are completed with the last element.
        """
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    # -- what they exchange --------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return nested tensors [n, ...] of all processes, joined along dim 0.

        Args:
            tensor: nested tensors of one shape on every process; a 0-d tensor counts as [1].
        """
        return ops.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data of all processes, without what only completes the last batch.

        Args:
            input_data: nested tensors [n, ...], or any objects.
            use_gather_object: whether to exchange objects though they hold tensors, for instance
                tensors of different shapes.

        Returns:
            As `gather`; for objects, the lists of all processes in one.
        """
        as_objects = use_gather_object or not _only_tensors(input_data)
        data = ops.gather_object(input_data) if as_objects else ops.gather(input_data)
        state = self.gradient_state
        if state.in_dataloader and not state.end_of_dataloader:
            return data
        remainder = state.remainder if state.in_dataloader else state.broken_off_remainder
        if remainder == -1:
            logger.info(
                "gather_for_metrics: the length of the data set is not known, so samples that "
                "complete the last batch cannot be told apart and stay."
            )
        if remainder <= 0:
            return data
        if as_objects:
            return data[:remainder]
        return recursively_apply(lambda tensor: tensor[:remainder], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the elementwise reduction of nested tensors over processes, times `scale`.

        Args:
            tensor: nested tensors of one shape on every process.
            reduction: "sum", "mean" or "none".
            scale: factor of the result.
        """
        return ops.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return nested tensors, padded to the size of the largest of any process.

        Args:
            tensor: nested tensors.
            dim: the dimension that differs.
            pad_index: the value to pad with.
            pad_first: whether to pad at the beginning.
        """
        return ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # -- agreeing to stop ----------------------------------------------------------------------

    def set_trigger(self) -> None:
        """Set this process's trigger, which `check_trigger` finds on every process."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process set its trigger, and reset it. Call it on every process."""
        flag = torch.tensor([self._trigger], dtype=torch.int32, device=self.device)
        self._trigger = False
        return bool(self.comm.all_reduce(flag, "max").item())

    def check_breakpoint(self) -> bool:
        """Do what `check_trigger` does, by the name that an example of the documentation uses."""
        return self.check_trigger()


def _only_tensors(data: Any) -> bool:
    """Return whether nested `data` holds tensors alone."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
