"""A loader that decides the order of its samples: epochs, generators, and their saved state."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel.comm.rng import preserved, synchronize_rng_states
from accel.data import worker_signals
from accel.data.order import (
    DrawnSampler,
    Order,
    Start,
    generator_of,
    held_generators,
)
from accel.data.samplers import (
    SkipBatchSampler,
    index_sampler,
    sampler_epoch,
    samplers,
    set_sampler_epoch,
)
from accel.data.stream import IterableDatasetShard
from accel.machine.enums import RNGType
from accel.machine.errors import CheckpointError, Problem


class OrderedLoader(DataLoader[Any]):
    """The order of a prepared loader's samples.

    Attributes:
        rng_types: generators that ranks synchronise at the start of a pass.
        synchronized_generator: the one called "generator".
    """

    _entries_per_batch = 1

    def __init__(
        self,
        dataset: Dataset[object],
        *,
        rng_types: Iterable[str | RNGType] | None,
        synchronized_generator: torch.Generator | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.rng_types = None if rng_types is None else list(rng_types)
        self.synchronized_generator = synchronized_generator
        self._order = Order(draws="all" if isinstance(dataset, IterableDataset) else "none")
        self._resumes = False  # whether passes begin where an earlier one was abandoned
        self._unskipped = index_sampler(self)
        self._skipped = self._skipped_now = 0  # entries that passes, and this one, skip
        sampler = getattr(self.batch_sampler, "sampler", None)
        if sampler is not None:
            # torch puts a sequential one here; `loader.sampler` should be the one in use.
            self.__dict__["sampler"] = sampler

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
        # torch draws the workers' seed. A pass that is resumed did so when it began: a second draw
        # would make the rest of a resumed epoch differ from that of an uninterrupted one. Where the
        # order is drawn from the process's generators, it is behind that draw.
        order = self._order
        resumes = self._resumes and order.replay is None and order.draws == "none"
        with preserved() if resumes else contextlib.nullcontext(), worker_signals.starting(self):
            return worker_signals.supervised(super()._get_iterator())

    def _batches(self, skipped: int = 0) -> Iterator[object]:
        """Return torch's iterator of a pass, `skipped` batches of which the caller skips."""
        self._epoch_of_dataset()
        order, generators = self._order, self.generators()
        with order.opening(generators), order.seeding(self, len(generators)):
            batches: Iterator[object] = self._whole(super().__iter__())
        if isinstance(self.dataset, IterableDataset) and order.replay is not None:
            batches = self._read_again(batches, (skipped + 1) * self._entries_per_batch)
        return batches

    def _whole(self, batches: Iterator[object]) -> Iterator[object]:
        """Return the batches of a pass out of those that torch's iterator gives."""
        return batches

    def _read_again(self, batches: Iterator[object], count: int) -> Iterator[object]:
        """Yield a stream's batches, the first `count` of which an earlier pass had read.

        They are read with the generators as that pass found them: all but the last are dropped.
        """
        with self._order.drawing(self.generators()):
            yield from itertools.islice(batches, count - 1)
            last = list(itertools.islice(batches, 1))
        yield from last
        yield from batches

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one where none is under way."""
        found = sampler_epoch(index_sampler(self))
        return self._order.passes if found is None else found

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to samplers and data set.

        Another epoch than that of a pass left early, or saved in, makes the next pass a new one.

        Args:
            epoch: number of the next pass, from 0 on.
        """
        order = self._order
        begun = order.resumed or order.started
        if begun is not None and order.under_way == 0 and begun.epoch != epoch:
            order.cancel()
        self._advance(epoch)
        self._epoch_of_dataset()

    @property
    def _source(self) -> Any:
        """The caller's data set, without the shard around it."""
        dataset = self.dataset
        return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset

    def _epoch_of_dataset(self) -> None:
        """Give the data set the epoch, if it takes one."""
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self.epoch)

    def _advance(self, epoch: int) -> None:
        self._order.passes = epoch
        set_sampler_epoch(index_sampler(self), epoch)

    def generators(self) -> list[torch.Generator]:
        """Return the generators that a stream, the loader and its samplers draw from."""
        held = held_generators(self.generator, index_sampler(self), self._order)
        own = generator_of(self.dataset)
        return held if own is None else [own, *(other for other in held if other is not own)]

    def _synchronize(self) -> None:
        order = self._order
        start = order.resumed
        if start is None and self._resumes and order.under_way == 1:
            start = order.started  # the pass that was left early
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        order.resumed, order.replay = None, start
        if start is None:
            start = order.capture(self.generators())
            start.samplers, start.epoch = self._sampler_states(), self.epoch
        else:
            for sampler, saved in zip(self._stateful_samplers(), start.samplers, strict=False):
                sampler.load_state_dict(saved)
        order.started = start

    def order_state(self) -> dict[str, Any]:
        """Return the state that decides the order of the samples.

        With the last batch of a pass in hand it is that of the next pass.

        Returns:
            epoch: that of the pass under way, or of the next one.
            samplers: state dicts of the samplers that have one, outermost first.
            generators: states of the generators of the loader and its samplers.
            order: "pass" ("under way", "left" early, "ended" or "none"), "now" (the present
                states of the generators), "process" and "agreed" (those of the process's own that
                decide the pass, or None), "digest" (of what the sampler drew first),
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
        return {
            "epoch": begun.epoch,
            "samplers": begun.samplers,
            "generators": begun.generators,
            "order": {
                "pass": "under way" if kind == "left" and under_way else kind,
                "now": now.generators,
                "process": begun.process,
                "agreed": begun.agreed,
                "digest": begun.digest,
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
        if len(stateful) != len(state["samplers"]):
            value = f"a data loader with {len(stateful)} samplers that have a state"
            rule = f"the saved one has {len(state['samplers'])}"
            remedy = "Build the loader, and set use_seedable_sampler, as when it was saved."
            raise CheckpointError(Problem(value, rule, remedy))
        for sampler, saved in zip(stateful, state["samplers"], strict=True):
            sampler.load_state_dict(saved)
        order, saved = self._order, state["order"]
        order.cancel()
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._check_samples(saved["samples"])
        if saved["stream"] and order.stream is None and order.draws == "torch":
            order.take_stream()  # saved on several processes
        order.restore(Start(saved["now"], stream=saved["stream"]), self.generators())
        begun = Start(
            state["generators"],
            saved["process"],
            state["samplers"],
            state["epoch"],
            saved["agreed"],
            digest=saved["digest"],
            stream=saved["began_with_stream"],
        )
        order.ended = saved["pass"] == "ended"
        if saved["pass"] == "under way":
            order.resumed = begun
        elif saved["pass"] == "left":
            order.started = begun

    def _check_samples(self, saved: int | None) -> None:
        found = self._num_samples()
        if None not in (saved, found) and saved != found:
            problem = Problem(
                f"a data loader over {found} samples",
                f"the saved one, which was prepared in its place, had {saved}",
                "Prepare the loaders in the order of the run that saved, over the same data; else "
                "samples are repeated or skipped.",
            )
            warnings.warn(str(problem), stacklevel=3)

    def _num_samples(self) -> int | None:
        return None if isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]

    def _stateful_samplers(self) -> list[Any]:
        found = (s for s in samplers(index_sampler(self)) if hasattr(s, "load_state_dict"))
        return [sampler for sampler in found if hasattr(sampler, "state_dict")]

    def _sampler_states(self) -> list[Any]:
        return [sampler.state_dict() for sampler in self._stateful_samplers()]
