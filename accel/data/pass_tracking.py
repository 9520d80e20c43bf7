"""The passes of a prepared loader: how they begin, end, nest, and what they show meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset

from accel.comm import rng
from accel.data.order import Pass, begun_after
from accel.data.resumable_loader import OrderedLoader
from accel.data.samplers import (
    SkipBatchSampler,
    index_arguments,
    index_sampler,
    last_batch_processes,
    loader_arguments,
)
from accel.data.stream import Rest
from accel.machine.errors import ConfigError
from accel.state import GradientState

T = TypeVar("T")
# Arguments of prepared loaders that a skipping copy does not take from attributes.
_NOT_COPIED = {"self", "dataset", "iteration", "use_stateful_dataloader", "kwargs"}


class PreparedLoader(OrderedLoader):
    """The base of the prepared loaders.

    Attributes:
        device: where batches are put; None leaves them where they are.
        skip_batches: number of batches that each pass fetches and skips at its start.
        end_of_dataloader: whether the batch in hand is the last of the pass.
        remainder: on the last batch, how many of its samples over all processes are real, 0 if all;
            -1 if that is not known.
        reading: an object that identifies the pass under way, None where there is none.
        use_stateful_dataloader: whether it is a loader of torchdata that has a state.
        transform: changes each batch once it is on the device, as a strategy needs it; None: does
            not.
    """

    use_stateful_dataloader = False
    transform: Callable[[Any], Any] | None = None

    def __init__(
        self,
        dataset: Dataset[object],
        *,
        device: torch.device | None,
        skip_batches: int,
        non_blocking: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = None if device is None else torch.device(device)
        self.skip_batches = skip_batches
        self.end_of_dataloader = False
        self.remainder = -1
        self.reading: object = None
        self._passes: list[Pass] = []  # that are under way
        self._last_size = 0
        self._rests: list[Rest] = []  # that workers handed over in the pass that began last
        self._behind = 0  # batches that a stateful loader read since its position
        self._non_blocking = non_blocking

    if not TYPE_CHECKING:  # checkers know the attributes that there are

        def __getattr__(self, name: str) -> Any:
            if name not in ("state_dict", "load_state_dict"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(
                f"{type(self).__name__}.{name}: only stateful loaders have a state of their own. "
                "Set DataLoaderConfiguration(use_stateful_dataloader=True); "
                "accelerator.save_state keeps the order of the others.",
                name=name,
                obj=self,
            )

    @property
    def base_dataloader(self) -> Self:
        """The torch loader that reads the batches: this one, which is of torch's class."""
        return self

    def _skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader like this one without its first `num_batches` batches."""
        own = inspect.signature(type(self).__init__).parameters.keys() - _NOT_COPIED
        arguments = loader_arguments(self) | {name: getattr(self, name) for name in own}
        entries = 0
        if isinstance(self.dataset, IterableDataset):
            arguments["skip_batches"] += num_batches
        else:
            entries = num_batches * self._entries_per_batch
            sampler = SkipBatchSampler(index_sampler(self), entries)
            arguments.update(index_arguments(self, sampler))
        loader = type(self)(self.dataset, **arguments)
        loader._unskipped = self._unskipped
        loader._skipped = loader._skipped_now = self._skipped + entries
        loader._order = self._order
        loader._resumes = True
        loader.transform = self.transform
        return loader

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches, transform = self._pass(), self.transform
        return batches if transform is None else (transform(batch) for batch in batches)

    def _pass(self) -> Iterator[object]:
        raise NotImplementedError

    def _position(self) -> dict[str, Any]:
        """Return the position from which the pass now beginning continues; {}: its start."""
        return {}

    def __getstate__(self) -> dict[str, object]:
        # Live workers and process groups are not pickled; the shard of a rank is known before.
        nothing = dict.fromkeys(("_iterator", "torch_device_mesh", "reading", "transform"))
        return {**self.__dict__, **nothing, "_passes": [], "_rests": []}

    @property
    def total_batch_size(self) -> int:
        """The samples of one batch over all processes."""
        raise NotImplementedError

    @property
    def total_dataset_length(self) -> int:
        """The samples of the data set."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    # -- for loops by hand ---------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The epoch of the current pass, or of the next one; to set it is to call `set_epoch`."""
        return self.epoch

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.set_epoch(iteration)

    @property
    def gradient_state(self) -> GradientState:
        """Where the run stands within a window, which all loaders share."""
        return GradientState()

    def get_sampler(self) -> Any:
        """Return the sampler that draws single samples."""
        return getattr(index_sampler(self), "sampler", self.sampler)

    def set_sampler(self, sampler: object) -> None:
        """Replace the sampler that draws single samples; batches are cut from it as before.

        Args:
            sampler: yields indices of the data set.

        Raises:
            ConfigError: for a loader over a stream, or one that does not batch.
        """
        if isinstance(self.dataset, IterableDataset) or self.batch_sampler is None:
            rule, remedy = (
                "only batches of a map data set are cut from one",
                "Build another loader.",
            )
            raise ConfigError.of("set_sampler", rule, remedy)
        self.batch_sampler.sampler = sampler  # type: ignore[attr-defined]
        self.__dict__["sampler"] = sampler  # torch refuses to set it

    def reset(self) -> None:
        """Forget where a pass stands: `end_of_dataloader` and `remainder` are as before one."""
        self.end_of_dataloader, self.remainder = False, -1

    def begin(self) -> None:
        """Make this the active loader of `GradientState`, as the start of a pass does."""
        self.reset()
        GradientState()._add_dataloader(self)

    def end(self) -> None:
        """Take this loader out of `GradientState`, as the end of a pass does."""
        GradientState()._remove_dataloader(self)

    # -- passes --------------------------------------------------------------------------------

    def _enter(self) -> Pass:
        """Start a pass; return what `_leave` takes."""
        order, epoch = self._order, self.epoch
        around = order.started if order.under_way else None
        found = Pass(
            epoch, self.end_of_dataloader, self.remainder, self.reading, around, order.at_end
        )
        self.end_of_dataloader, self.remainder, self.reading = False, -1, object()
        found.others = GradientState()._add_dataloader(self)
        self._passes.append(found)
        order.live.append(found)
        order.at_end = None
        return found

    @property
    def batches_given(self) -> int:
        """How many batches the pass under way has given."""
        return self._passes[-1].given if self._passes else 0

    @property
    def in_hand(self) -> tuple[int, int]:
        """Real samples, and all, of the batch in hand over all processes."""
        if self._passes and (noted := self._passes[-1].in_hand) is not None:
            # What is gathered after a pass within this one would be cut in the middle of an epoch.
            others = GradientState()._num_passes > self._passes[-1].num_begun
            return noted if self.end_of_dataloader or not others else (noted[1], noted[1])
        size = self._last_size if self.end_of_dataloader else self.total_batch_size
        real = self.remainder if self.end_of_dataloader else size
        return (real if 0 < real < size else size), size

    @property
    def processes_in_hand(self) -> tuple[int, int] | None:
        """How many processes have real samples in hand, if whole batches complete the last round.

        With the number of all; None elsewhere.
        """
        is_completed = self.end_of_dataloader and self.remainder > 0
        return last_batch_processes(index_sampler(self)) if is_completed else None

    def _read_in_turns(self) -> list[PreparedLoader]:
        """Return the loaders that give batches in turns with this one, begun last, as by `zip`.

        A loop around another gives none while the inner one is read.
        """
        others = self._passes[-1].others if self._passes else []
        return [one for one, given in others if one.batches_given > given]

    def _followed(self, units: Iterator[T]) -> Iterator[T]:
        """Return `units`, which are read one ahead; stateful loaders note their state."""
        return units

    def _end(self, current: Pass, remainder: int, size: int | None = None) -> None:
        """Note that the batch given next, of `size` samples over all processes, is the last.

        Without a size it is full; repetitions count. `remainder` is what the attribute says then.
        """
        shown, ordered = self._showing(current)
        shown.remainder = remainder
        self._last_size = size or self.total_batch_size
        shown.end_of_dataloader = True
        ordered.at_end = current.epoch
        GradientState()._follow_dataloader()

    def _complete(self, current: Pass) -> None:
        """End a complete pass: advance the epoch, unless the caller has chosen one meanwhile."""
        order = self._order
        current.is_complete = True
        shown, _ = self._showing(current)
        shown.end_of_dataloader = False
        GradientState()._follow_dataloader()
        if self._resumes and order.ended and not current.given and order.started is not None:
            # The checkpoint was saved at the end of the pass that this one resumes.
            order.restore(order.started, self.generators())
            if order.started.agreed is not None:  # for all ranks, indices were drawn
                rng.restore_host(order.started.agreed)
            return
        self._finish(current)

    def _abandoned(self) -> tuple[int, int]:
        """Return real samples, and all, of the last batch; (0, 0) if processes had other shares."""
        real, size = self.remainder, self._last_size
        processes, count = self.processes_in_hand or (real, size)
        return (real, size) if processes * size == real * count else (0, 0)

    def _finish(self, current: Pass) -> None:
        order = self._order
        order.ended = False
        if self.epoch == current.epoch:
            self._advance(current.epoch + 1)

    def _showing(self, current: Pass) -> tuple[Any, Any]:
        """Return what shows the values of a pass: the loader, and its order.

        Where others began since, as an iterator that is dropped later, it is what they restore.
        """
        order = self._order
        return begun_after(current, self._passes) or self, begun_after(current, order.live) or order

    def _leave(self, current: Pass) -> None:
        order, state = self._order, GradientState()
        shown, ordered = self._showing(current)
        self._passes.remove(current)
        order.live.remove(current)
        if ordered is order:
            order.replay = None
        if shown.end_of_dataloader:  # the caller keeps the last batch, and left
            if shown is self:
                # For gather_for_metrics.
                state.abandoned_remainder = self._abandoned()
            current.is_complete = True  # nothing remained to be read, as where loaders are zipped
            self._finish(current)
        ordered.at_end = current.at_end
        if current.is_complete or order.under_way:
            ordered.started = current.started
        shown.end_of_dataloader, shown.remainder = current.end_of_dataloader, current.remainder
        shown.reading = current.reading
        state._remove_dataloader(self)
