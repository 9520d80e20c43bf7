"""Collective operations of a run: gathering, reducing, metrics, triggers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accel.comm import ops
from accel.logging import get_logger
from accel.machine.tree import recursively_apply

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.state import GradientState

T = TypeVar("T")
logger = get_logger(__name__)


@dataclass(frozen=True)
class _Batch:
    """A batch in hand, over all processes.

    Attributes:
        real: samples that are no repetitions, at least 1.
        size: samples, repetitions included.
        in_hand: whether the pass is under way, so that all that is gathered belongs to this batch.
        processes: how many processes have real samples, and all, where whole batches complete it.
    """

    real: int
    size: int
    in_hand: bool = True
    processes: tuple[int, int] | None = None

    def real_rows(self, num_rows: int) -> int | None:
        """Return how many of the rows, as many of each process, are real; None if not its rows."""
        processes, count = self.processes or (self.real, self.size)
        return num_rows // count * processes if num_rows % count == 0 else None


def _batch_of(loader: Any) -> _Batch:
    real, size = loader.in_hand
    return _Batch(real, size, processes=loader.processes_in_hand)


class Collectives:
    """Collective operations of a run: a part of the `Accelerator`.

    Attributes:
        plan: everything decided, frozen.
        comm: how processes talk.
        gradient_state: where the current window, and the pass over a loader, stand.
    """

    plan: Plan
    comm: Communicator
    gradient_state: GradientState

    def _start_collectives(self) -> None:
        self._trigger = False
        # In a single process: the `reading` of the pass under way, and how many rows were gathered
        # of full batches.
        self._full_rows: tuple[object, set[int]] = None, set()

    def gather(self, tensor: T) -> T:
        """Return nested tensors [n, ...] of all processes, joined along dim 0.

        Args:
            tensor: nested tensors of one shape on every process; a 0-d tensor counts as [1]. Other
                shapes: see `pad_across_processes`; ``ACCELERATE_DEBUG_MODE=1`` names them, where a
                process ended in an error of the backend, or was aborted.
        """
        return ops.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data of all processes, without what only completes the last batch.

        Ranks that compute the same samples (tensor parallelism) count once. Rows are dropped while
        the last batch of a loader is in hand (with ``dispatch_batches=True``, any completed one),
        and after a pass that was left with it, as in ``batch = next(iter(loader))``, until another
        pass begins. Each sample has the same number of rows, or each process has one row (the loss
        of its batch): then as many rows stay as the last batch has samples, at most. Other data is
        kept, with one warning. Where whole batches complete the last round (batches that vary),
        all rows of the processes with real samples stay. Where loaders are read side by side (with
        ``zip``) and rows fit several of them, all stay. A single process completes no batch; of a
        repeated loss, as ``loss.repeat(batch_size)``, one number stays for each sample.
        Rows must come from a prepared loader: others that are gathered while the last batch of a
        prepared one is in hand are taken for its rows.

        Args:
            input_data: nested tensors [n, ...], or any objects.
            use_gather_object: whether to exchange objects though they hold tensors, for instance
                tensors of different shapes.

        Returns:
            As `gather`; for objects, the lists of all processes in one, or a list of what is no
            list by rank. A single process gets the objects as they are.
        """
        leaders = self.plan.parallel_dims.dp_leaders
        last = self._in_hand()
        are_objects = use_gather_object or not _only_tensors(input_data)
        if self.comm.world_size == 1:
            cut = self._without_those_of_full_batches
            return input_data if are_objects else recursively_apply(cut, input_data)
        if are_objects:
            gathered = ops.gather_object([input_data])
            values = [gathered[rank] for rank in leaders]
            if len(last) == 1 and last[0].processes is not None:
                values, last = values[: last[0].processes[0]], []
            several = isinstance(input_data, (list, tuple))
            data = [item for value in values for item in value] if several else values
            counts = {len(value) for value in values} if several else {1}
            # Where processes gave different numbers, rows do not belong to samples evenly.
            return self._without_repetitions(data, last, even=len(counts) == 1)
        data = ops.gather(input_data)
        if len(leaders) < self.comm.world_size:
            data = recursively_apply(_distinct, data, leaders, self.comm.world_size)
        return recursively_apply(self._without_repetitions, data, last)

    def _in_hand(self) -> list[_Batch]:
        """Return the counts of the batches in hand, one of which has repetitions; else []."""
        state = self.gradient_state
        if not state.in_dataloader:
            real, size = state.abandoned_remainder
            return [_Batch(real, size, in_hand=False)] if 0 < real < size else []
        active: Any = state.active_dataloader
        read = [active, *active._read_in_turns()]
        if any(one.end_of_dataloader and one.remainder == -1 for one in read):
            logger.warning_once(
                "gather_for_metrics: loader workers cannot hand over samples of this data set, so "
                "repeated ones that complete a batch cannot be told apart and stay."
            )
        found = [_batch_of(one) for one in read]
        return found if any(last.real < last.size for last in found) else []

    def _without_repetitions(self, rows: Any, ended: Sequence[_Batch], even: bool = True) -> Any:
        """Return the rows [k * size, ...] of the real samples; they belong to one of `ended`.

        `even`: whether each process gave as many rows.
        """
        if not ended:
            return rows
        if even and len(rows) == len(self.plan.parallel_dims.dp_leaders) and ended[0].in_hand:
            return self._without_repeating_processes(rows, ended)
        fits = [last for last in ended if even and last.real_rows(len(rows)) is not None]
        kept = {last.real_rows(len(rows)) for last in fits}
        if len(kept) == 1:
            return rows[: kept.pop()]
        if kept:
            self._tell_ambiguous(len(rows), fits)
        elif ended[0].in_hand:
            logger.warning_once(
                "gather_for_metrics: %d rows for the %d samples of the batch in hand, of which %d "
                "are real: each sample must have as many rows, so nothing was dropped and repeated "
                "samples stay. Gather a fixed number of rows per sample.",
                len(rows),
                ended[0].size,
                ended[0].real,
            )
        return rows

    def _without_repeating_processes(self, rows: Any, ended: Sequence[_Batch]) -> Any:
        """Return the rows, one of each process, of which there are no more than real samples.

        As documented: of the rows of a last batch, as many as it has samples stay.
        """
        kept = {min(last.real, *(last.processes or (len(rows),))) for last in ended}
        if len(kept) != 1:
            self._tell_ambiguous(len(rows), ended)
            return rows
        last, num_rows = ended[0], kept.pop()
        if last.processes is None and num_rows * last.size != last.real * len(rows):
            logger.warning_once(
                "gather_for_metrics: one row of each process for the %d samples of the batch in "
                "hand, of which %d are real: %d rows stay, in which repeated samples count, too. "
                "Gather a row for each sample, and reduce them afterwards.",
                last.size,
                last.real,
                num_rows,
            )
        return rows[:num_rows]

    def _without_those_of_full_batches(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of the batch in hand; of a loss for a full one, as many as it has."""
        active: Any = self.gradient_state.active_dataloader
        if active is None or active.reading is None or rows.ndim != 1:
            return rows
        if self._full_rows[0] is not active.reading:
            self._full_rows = active.reading, set()
        seen, num_rows = self._full_rows[1], len(rows)
        if not (active.end_of_dataloader and active.remainder > 0):
            seen.add(num_rows)
            return rows
        full = active.total_batch_size
        is_of_full = num_rows in seen and num_rows % full == 0
        # Other rows may be those of another loader, which is not prepared.
        if not (is_of_full and rows.is_floating_point() and bool((rows == rows[:1]).all())):
            return rows
        return rows[: num_rows // full * active.remainder]

    def _tell_ambiguous(self, num_rows: int, ended: Sequence[_Batch]) -> None:
        logger.warning_once(
            "gather_for_metrics: %d rows, where loaders that are read side by side have %s real "
            "samples in hand: rows do not tell whose they are, so nothing was dropped and "
            "repeated samples stay. Gather with gather() and cut the last batch by the length of "
            "its data set, or read the loaders one after the other.",
            num_rows,
            " and ".join(str(last.real) for last in ended),
        )

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Return the elementwise reduction of nested tensors over processes, times `scale`.

        Args:
            tensor: nested tensors of one shape on every process.
            reduction: "sum", "mean" or "none".
            scale: factor of the result.
        """
        return ops.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> T:
        """Return nested tensors, padded to the size of the largest of any process.

        Args:
            tensor: nested tensors.
            dim: the dimension that differs.
            pad_index: the value to pad with.
            pad_first: whether to pad at the beginning.
        """
        return ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # -- agreeing to stop ----------------------------------------------------------------------

    @property
    def flag_tensor(self) -> torch.Tensor:
        """[1] 1 where this process set its trigger since the last check, else 0."""
        return torch.tensor([self._trigger], dtype=torch.int32, device=self.plan.device)

    @flag_tensor.setter
    def flag_tensor(self, flag_tensor: torch.Tensor | None) -> None:
        self._trigger = flag_tensor is not None and bool(flag_tensor.any())

    def set_trigger(self) -> None:
        """Set this process's trigger, which `check_trigger` finds on every process."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process set its trigger, and reset it. Call it on every process."""
        flag = self.flag_tensor
        self._trigger = False
        return bool(self.comm.all_reduce(flag, "max").item())

    def check_breakpoint(self) -> bool:
        """Do what `check_trigger` does, by the name that an example of the documentation uses."""
        return self.check_trigger()


def _only_tensors(data: object) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _distinct(rows: torch.Tensor, leaders: Sequence[int], world_size: int) -> torch.Tensor:
    """Return the rows of the ranks `leaders`, out of those of all ranks."""
    of_ranks = rows.tensor_split(world_size)
    return torch.cat([of_ranks[rank] for rank in leaders])
