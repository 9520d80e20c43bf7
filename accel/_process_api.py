"""The part of `Accelerator` that concerns processes: who runs what, and what they exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel import ops
from accel.comm.control import ProcessControl
from accel.logging import get_logger
from accel.tree import recursively_apply

if TYPE_CHECKING:
    from accel.state import AcceleratorState, GradientState
    from accel.strategies.base import Strategy

logger = get_logger(__name__)


class ProcessAPI(ProcessControl):
    """Mixin of `Accelerator`: process control and collectives."""

    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    _trigger: bool = False

    # -- what they exchange --------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return nested tensors [n, ...] of all processes, joined along dim 0.

        Args:
            tensor: nested tensors of one shape on every process; a 0-d tensor counts as [1].
        """
        return ops.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data of all processes, without what only completes the last batch.

        Of processes that compute the same samples (tensor parallelism), the first one's are kept.
        Samples are dropped while the last batch of a loader is in hand. After a pass that was left
        with it, as in ``batch = next(iter(loader))``, this holds for data of as many samples, until
        the next pass over a loader begins.

        Args:
            input_data: nested tensors [n, ...], or any objects.
            use_gather_object: whether to exchange objects though they hold tensors, for instance
                tensors of different shapes.

        Returns:
            As `gather`; for objects, the lists of all processes in one.
        """
        as_objects = use_gather_object or not _only_tensors(input_data)
        data = ops.gather_object(input_data) if as_objects else ops.gather(input_data)
        copies = self.comm.world_size // self.strategy.data_rank[1]
        if copies > 1:
            data = _distinct(data, copies, self.comm.world_size, as_objects)
        remainder, size = self._repetitions()
        if remainder <= 0:
            return data
        if as_objects:
            return _first(data, remainder, size)
        return recursively_apply(_first, data, remainder, size)

    def _repetitions(self) -> tuple[int, int | None]:
        """Return how many samples of the batch in hand are real, 0 if all, and how many there are.

        The latter is None inside a pass, where everything that is gathered is of that batch.
        """
        state = self.gradient_state
        if self.comm.world_size == 1:  # a short batch is not completed
            return 0, None
        if not state.in_dataloader:
            return state.broken_off
        if state.end_of_dataloader and state.remainder == -1:
            logger.info(
                "gather_for_metrics: the length of the data set is not known, so samples that "
                "complete the last batch cannot be told apart and stay."
            )
        return (state.remainder if state.end_of_dataloader else 0), None

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


def _distinct(data: Any, copies: int, world_size: int, as_objects: bool) -> Any:
    """Return what the first of each `copies` neighbours gave, out of what all ranks did."""

    def kept(entries: Any) -> Any:
        size = len(entries) // world_size
        own = [entries[r * size : (r + 1) * size] for r in range(0, world_size, copies)]
        return [entry for part in own for entry in part] if as_objects else torch.cat(own)

    return kept(data) if as_objects else recursively_apply(kept, data)


def _first(data: Any, count: int, size: int | None) -> Any:
    """Return the first `count` entries of a list or tensor, if it has `size` (None: any number)."""
    return data[:count] if size in (None, len(data)) else data
