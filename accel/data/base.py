"""What the prepared loaders have in common, and how a loader is built again with changes."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel import rng
from accel.data import epochs, workers
from accel.data.order import (
    DrawnSampler,
    Order,
    Start,
    check_samplers,
    generator_of,
    held_generators,
)
from accel.data.passes import Pass, begun_after
from accel.data.sampler_draws import Drawn
from accel.data.samplers import (
    SeedableRandomSampler,
    SkipBatchSampler,
    index_arguments,
    index_sampler,
    loader_arguments,
    sampler_epoch,
    samplers,
    set_sampler_epoch,
)
from accel.errors import Problem
from accel.rng import preserved, synchronize_rng_states
from accel.state import GradientState
from accel.window_ends import Reading

_PASSES_BEFORE_WARNING = 2


class PreparedLoader(DataLoader[Any]):
    """What the prepared loaders have in common.

    Attributes:
        device: where batches are put; None leaves them where they are.
        rng_types: generators that ranks synchronise at the start of a pass.
        synchronized_generator: the one called "generator".
        skip_batches: how many batches each pass leaves out at its start, after fetching them.
        end_of_dataloader: whether the batch in hand is the last of the pass.
        remainder: on the last batch, how many of its samples over all processes are real, 0 if all;
            -1 if that is not known.
        reading: the pass under way, None where there is none.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None,
        rng_types: Iterable[Any] | None,
        synchronized_generator: torch.Generator | None,
        skip_batches: int,
        non_blocking: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = None if device is None else torch.device(device)
        self.rng_types = None if rng_types is None else list(rng_types)
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.end_of_dataloader = False
        self.remainder = -1
        self.reading: Reading | None = None
        self._passes: list[Pass] = []  # that are under way
        self._last_size = 0
        self._non_blocking = non_blocking
        self._order = Order(draws="all" if isinstance(dataset, IterableDataset) else "none")
        self._goes_on = False  # whether passes begin where an earlier one was cut off
        self._unskipped = index_sampler(self)
        self._skipped = self._skipped_now = 0  # its entries that passes, and this one, leave out
        sampler = getattr(self.batch_sampler, "sampler", None)
        if sampler is not None:
            # torch puts a sequential one here; `loader.sampler` should be the one in use.
            self.__dict__["sampler"] = sampler

    def _own_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that only this class takes."""
        raise NotImplementedError

    def _skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader like this one without its first `num_batches` batches."""
        arguments = {**loader_arguments(self), **self._own_arguments()}
        arguments["skip_batches"] = self.skip_batches
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
        loader._goes_on = True
        return loader

    @property
    def _index_sampler(self) -> Any:
        # What torch draws indices from; `batch_sampler` and `sampler` stay the caller's.
        sampler = index_sampler(self)
        if isinstance(self.dataset, IterableDataset):
            return sampler
        if self._skipped_now != self._skipped:  # of a position in a pass that skipped otherwise
            sampler = SkipBatchSampler(self._unskipped, self._skipped_now)
        return DrawnSampler(sampler, self._order, self.generator)

    def _get_iterator(self) -> Any:
        # torch draws the workers' seed. The pass that is gone on with did so when it began, so that
        # a second draw would make the rest of a resumed epoch differ from one that was not cut.
        order = self._order
        seeded = isinstance(self.dataset, IterableDataset) or order.draws in ("none", "agreed")
        goes_on = self._goes_on and order.replay is None and seeded
        with preserved() if goes_on else contextlib.nullcontext(), workers.starting(self):
            return workers.supervised(super()._get_iterator())

    def _batches(self, skipped: int = 0) -> Iterator[Any]:
        """Return torch's iterator of a pass; the data set learns the epoch before it is read.

        Args:
            skipped: how many batches of this process the caller leaves out.
        """
        epoch = epochs.tell(self)
        order, generators = self._order, self.generators()
        with order.opening(generators), order.seeding(self, len(generators)):
            batches: Iterator[Any] = super().__iter__()
        if isinstance(self.dataset, IterableDataset) and order.replay is not None:
            batches = self._read_again(batches, (skipped + 1) * self._entries_per_batch)
        return batches if epoch is None else epochs.told(self, batches, epoch)

    def _read_again(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Yield a stream's batches, the first `count` of which an earlier pass had read.

        They are read with the generators as that pass found them: all but the last are left out.
        """
        with self._order.drawing(self.generators()):
            yield from itertools.islice(batches, count - 1)
            last = list(itertools.islice(batches, 1))
        yield from last
        yield from batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._order.read_elsewhere:
            return self._pass()
        self._order.read_elsewhere = False
        self._pass_over()
        return iter(())

    def _pass(self) -> Iterator[Any]:
        """Yield the batches of a pass."""
        raise NotImplementedError

    def _pass_over(self) -> None:
        """Make a pass without batches: take part in what the ranks agree on."""
        current = self._enter()
        try:
            self._synchronize()
            if not isinstance(self.dataset, IterableDataset):
                with self._order.opening(self.generators()):
                    for _ in self._index_sampler:
                        pass
            for _ in self._compared(iter(())):
                pass
            self._complete(current)
        finally:
            self._leave(current)

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return `batches`, the first of which may be compared with those of other ranks."""
        return batches

    _entries_per_batch = 1

    def _position(self) -> dict[str, Any]:
        """Return the position that the pass now beginning goes on from; {}: its start."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # Neither live workers nor process groups travel; what a rank reads was decided before.
        nothing = {"_iterator": None, "torch_device_mesh": None, "reading": None}
        return {**self.__dict__, **nothing, "_passes": []}

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one where none is under way."""
        found = sampler_epoch(index_sampler(self))
        return self._order.passes if found is None else found

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to samplers and data set.

        The end of a pass hands the next epoch to the samplers, its start to the data set. Another
        epoch than that of a pass left early, or saved in, makes the next pass a new one.

        Args:
            epoch: number of the next pass, from 0 on.
        """
        order = self._order
        begun = order.resumed or order.started
        if begun is not None and order.under_way == 0 and begun.epoch != epoch:
            order.cancel()
        if self.epoch != epoch:
            order.left = 0
        self._advance(epoch)
        epochs.tell(self)

    def _advance(self, epoch: int) -> None:
        self._order.passes = epoch
        set_sampler_epoch(index_sampler(self), epoch)

    def _warn_once(self, problem: Problem) -> None:
        if problem.rule not in self._order.warned:
            self._order.warned.add(problem.rule)
            warnings.warn(str(problem), stacklevel=4)

    def generators(self) -> list[torch.Generator]:
        """Return the generators that a stream, the loader and its samplers draw from."""
        held = held_generators(self.generator, index_sampler(self), self._order)
        own = generator_of(self.dataset)
        return held if own is None else [own, *(other for other in held if other is not own)]

    def order_state(self) -> dict[str, Any]:
        """Return what decides the order of the samples.

        With the last batch of a pass in hand it is that of the next pass.

        Returns:
            epoch: that of the pass under way, or of the next one.
            samplers: state dicts of the samplers that have one, outermost first.
            generators: states of the generators of the loader and its samplers.
            order: "pass" ("under way", "left" early, "ended" or "none"), "now" (the present
                states of the generators), "process" and "agreed" (those of the process's own that
                decide the pass, or None), "drawn" (how far the sampler has drawn, or None),
                "stream" (whether the last generator is the loader's own, "began_with_stream"
                whether it was) and "samples" of the data set (None: not known).

        The first three are as the pass under way, or left early, began.
        """
        order = self._order
        ended = order.at_end is not None
        started = None if ended else order.resumed or order.started
        under_way = order.under_way > 0 or order.resumed is not None
        now = order.present(self.generators())
        epoch = self.epoch + int(order.at_end == self.epoch)
        begun = started or replace(now, samplers=self._sampler_states(), epoch=epoch)
        kind = "ended" if ended else "none" if started is None else "left"
        drawn = begun.so_far()
        return {
            "epoch": begun.epoch,
            "samplers": begun.samplers,
            "generators": begun.generators,
            "order": {
                "pass": "under way" if kind == "left" and under_way else kind,
                "now": now.generators,
                "process": begun.process,
                "agreed": begun.agreed,
                "drawn": None if drawn is None else asdict(drawn),
                "stream": order.stream is not None,
                "began_with_stream": begun.stream,
                "samples": self._num_samples(),
            },
        }

    def load_order_state(self, state: dict[str, Any]) -> None:
        """Take over what `order_state` returned: the next pass has the order of the saved one.

        Args:
            state: the entries that `order_state` lists.

        Raises:
            CheckpointError: if the loader has other samplers than the saved one.
        """
        stateful = self._stateful_samplers()
        check_samplers(len(stateful), len(state["samplers"]))
        for sampler, saved in zip(stateful, state["samplers"], strict=True):
            sampler.load_state_dict(saved)
        order, saved = self._order, state.get("order")
        order.cancel()
        order.left = 0
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        if saved is None:  # of an earlier version, which kept the start of a pass alone
            stream = order.stream is not None
            order.restore(Start(state["generators"], stream=stream), self.generators())
            return
        self._check_samples(saved["samples"])
        if saved["stream"] and order.stream is None and order.draws == "torch":
            order.take_stream()  # saved on several processes
        order.restore(Start(saved["now"], stream=saved["stream"]), self.generators())
        drawn = saved.get("drawn")  # none of an earlier version
        begun = Start(
            state["generators"],
            saved["process"],
            state["samplers"],
            state["epoch"],
            saved["agreed"],
            drawn=None if drawn is None else Drawn(**drawn),
            stream=saved.get("began_with_stream", saved["stream"]),
        )
        order.ended = saved["pass"] == "ended"
        if saved["pass"] == "under way":
            order.resumed = begun
        elif saved["pass"] == "left":
            order.started = begun

    def _check_samples(self, saved: int | None) -> None:
        found = self._num_samples()
        if None not in (saved, found) and saved != found:
            warnings.warn(
                str(
                    Problem(
                        f"a data loader over {found} samples",
                        f"the saved one, which was prepared in its place, had {saved}",
                        "Prepare the loaders in the order of the run that saved, over the same "
                        "data; else samples are repeated or left out.",
                    )
                ),
                stacklevel=3,
            )

    def _num_samples(self) -> int | None:
        return None if isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]

    def _stateful_samplers(self) -> list[Any]:
        names = ("state_dict", "load_state_dict")
        return [
            sampler
            for sampler in samplers(index_sampler(self))
            if all(hasattr(sampler, name) for name in names)
        ]

    def _sampler_states(self) -> list[Any]:
        return [sampler.state_dict() for sampler in self._stateful_samplers()]

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

    def _enter(self) -> Pass:
        """Start a pass; return what `_leave` takes."""
        epochs.heed(self)
        order, epoch = self._order, self.epoch
        around = order.started if order.under_way else None
        found = Pass(
            epoch, self.end_of_dataloader, self.remainder, self.reading, around, order.at_end
        )
        self.end_of_dataloader, self.remainder, self.reading = False, -1, Reading()
        found.others = GradientState()._add_dataloader(self)
        self._passes.append(found)
        order.live.append(found)
        order.at_end = None
        return found

    def _synchronize(self) -> None:
        order = self._order
        start = order.resumed
        if start is None and self._goes_on and order.under_way == 1:
            start = order.started  # the pass that was left early
        if start is not None:
            start.keep_drawn()
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        order.resumed, order.replay = None, start
        if start is None:
            start = order.capture(self.generators())
            start.samplers, start.epoch = self._sampler_states(), self.epoch
            self._warn_of_repetition()
        else:
            for sampler, saved in zip(self._stateful_samplers(), start.samplers, strict=False):
                sampler.load_state_dict(saved)
        order.started = start

    def _warn_of_repetition(self) -> None:
        seeded = any(
            isinstance(sampler, SeedableRandomSampler) for sampler in samplers(index_sampler(self))
        )
        if seeded and not self._goes_on and self._order.left >= _PASSES_BEFORE_WARNING:
            self._warn_once(
                Problem(
                    f"another pass in the order of epoch {self.epoch}, after "
                    f"{self._order.left} that were left early",
                    "the order of a seedable sampler is a function of seed and epoch, and only a "
                    "whole pass counts the epoch on: the same first samples are read again",
                    "Call loader.set_epoch(epoch) before each pass, or skip_first_batches(loader, "
                    "n) to go on where a pass was left.",
                )
            )

    @property
    def batches_given(self) -> int:
        """How many batches the pass under way has given."""
        return self._passes[-1].given if self._passes else 0

    @property
    def in_hand(self) -> tuple[int, int]:
        """Real samples, and all, of the batch in hand over all processes."""
        size = self._last_size if self.end_of_dataloader else self.total_batch_size
        real = self.remainder if self.end_of_dataloader else size
        return (real if 0 < real < size else size), size

    def _read_in_turns(self) -> list[PreparedLoader]:
        """Return the loaders that give batches in turns with this one, begun last, as by `zip`.

        A loop around another gives none while the inner one is read.
        """
        others = self._passes[-1].others if self._passes else []
        return [one for one, given in others if one.batches_given > given]

    def _followed(self, units: Iterator[Any]) -> Iterator[Any]:
        """Return `units`, which are read one ahead; stateful loaders note their state."""
        return units

    def _end(self, current: Pass, remainder: int, size: int | None = None) -> None:
        """Say that the batch given next is the last.

        Args:
            current: the pass.
            remainder: what `remainder` says.
            size: samples of the batch over all processes, repetitions included; None or 0: a full
                batch.
        """
        shown, ordered = self._showing(current)
        shown.remainder = remainder
        self._last_size = size or self.total_batch_size
        shown.end_of_dataloader = True
        ordered.at_end = current.epoch
        GradientState()._follow_dataloader()

    def _complete(self, current: Pass) -> None:
        """End a whole pass: go on to the next epoch, unless the caller has chosen one meanwhile."""
        order = self._order
        current.whole = True
        shown, _ = self._showing(current)
        if shown is self:
            GradientState()._note_end(self)
            self._note_repetitions(current.given)
        shown.end_of_dataloader = False
        GradientState()._follow_dataloader()
        if self._goes_on and order.ended and not current.given and order.started is not None:
            # The checkpoint was saved at the end of the pass that this one goes on with.
            order.restore(order.started, self.generators())
            if order.started.agreed is not None:  # for all ranks, indices were drawn
                rng.restore_host(order.started.agreed)
            return
        self._finish(current)

    def _note_repetitions(self, num_batches: int) -> None:
        """Keep, for metrics that are gathered after a whole pass, how many samples it repeated."""
        real, size = self.in_hand
        if real < size:
            total = (num_batches - 1) * self.total_batch_size + size
            GradientState().passed = total, size - real

    def _finish(self, current: Pass) -> None:
        order = self._order
        order.ended = False
        order.left = 0
        if self.epoch == current.epoch:
            self._advance(current.epoch + 1)

    def _showing(self, current: Pass) -> tuple[Any, Any]:
        """Return what shows the values of a pass: the loader, and its order.

        Where others began since, as an iterator that is dropped later, it is what they restore.
        """
        order = self._order
        return begun_after(current, self._passes) or self, begun_after(current, order.live) or order

    def _leave(self, current: Pass) -> None:
        """End a pass, whole or broken off."""
        order, state = self._order, GradientState()
        shown, ordered = self._showing(current)
        self._passes.remove(current)
        order.live.remove(current)
        if ordered is order:
            order.replay = None
        if shown.end_of_dataloader:  # the caller keeps the last batch, and left
            if shown is self:
                state.broken_off = self.remainder, self._last_size  # for gather_for_metrics
            current.whole = True  # nothing was left to read, as where loaders are zipped
            self._finish(current)
        ordered.at_end = current.at_end
        if current.whole or order.under_way:
            ordered.started = current.started
        elif not self._goes_on:
            order.left += 1
        if shown is self:
            state._note_end(self)
        shown.end_of_dataloader, shown.remainder = current.end_of_dataloader, current.remainder
        shown.reading = current.reading
        state._remove_dataloader(self)
