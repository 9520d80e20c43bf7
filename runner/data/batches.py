"""Micro-batches, and the window of them that makes one optimizer step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from accel.comm.ops import send_to_device
from accel.comm.rng import mix_seeds
from accel.data import batch_layout
from accel.data.prepare import prepare_data_loader, prepare_for
from accel.machine.device import copies_in_order
from accel.machine.errors import ConfigError, Problem, Problems
from runner.data.datasets import (
    Data,
    SeededDataset,
    SeededOrder,
    SeededStream,
    TokenSampler,
    WindowSampler,
    make_loader,
    make_order,
    num_samples,
)
from runner.recipe.batch_plan import BatchPlan, limited, plan_batches
from runner.recipe.schema import SPLITS

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.recipe.schema import Recipe


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one rank in one forward pass.

    Attributes:
        batch: as collated.
        valid: [B] bool, False where a sample only pads the batch; None: all are real.
    """

    batch: Any
    valid: torch.Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> MicroBatch:
        """Return this micro-batch on `device`."""
        return MicroBatch(
            send_to_device(self.batch, device, non_blocking),
            send_to_device(self.valid, device, non_blocking),
        )


class OnDevice(Sequence[MicroBatch]):
    """Micro-batches that lie on the host, and move to the device one at a time, when they are read.

    Copies to an accelerator are not waited for.
    """

    def __init__(self, on_host: Sequence[MicroBatch], device: torch.device) -> None:
        self.on_host = on_host
        self._device = device
        self._non_blocking = copies_in_order(device)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return OnDevice(self.on_host[index], self._device)
        return self.on_host[index].to(self._device, self._non_blocking)

    def __len__(self) -> int:
        return len(self.on_host)


@dataclass
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        micro_batches: in order, each on the device once it is read; every rank has as many.
        num_samples: real samples of the step over all processes.
    """

    micro_batches: Sequence[MicroBatch]
    num_samples: int

    @property
    def on_host(self) -> Sequence[MicroBatch]:
        """The micro-batches as they were read, before they move to the device."""
        read = self.micro_batches
        return read.on_host if isinstance(read, OnDevice) else read


def with_last(
    windows: Iterator[Window], num_before: int, num_windows: int | None
) -> Iterator[tuple[Window, bool]]:
    """Yield each window, from `num_before` on, and whether it is the last of its epoch.

    Where `num_windows` of the epoch is None (unknown), each is fetched one ahead.
    """
    if num_windows is not None:
        for number, window in enumerate(windows, start=num_before + 1):
            yield window, number == num_windows
        return
    ahead = next(windows, None)
    while ahead is not None:
        window, ahead = ahead, next(windows, None)
        yield window, ahead is None


logger = logging.getLogger(__name__)


class TrainBatches:
    """The optimizer steps of each epoch, as windows of micro-batches on this process.

    The samples of step k of an epoch are the same on any number of processes and loader workers. On
    several processes a short last window is completed, so that each has as many micro-batches; what
    only completes it is marked invalid. The `dataloader_config` of the accelerator says how batches
    are divided; `loader` is the prepared loader.

    Raises:
        ConfigError: if the recipe asks for what the data cannot give.
    """

    def __init__(
        self, accelerator: Accelerator, data: Data, recipe: Recipe, plan: BatchPlan
    ) -> None:
        self.accelerator = accelerator
        self.dims = accelerator.parallel_dims
        self.recipe = recipe
        self.plan = plan
        self._round_size = plan.round_size
        self.streamed = isinstance(data.train, IterableDataset)
        ConfigError.raise_if(training_problems(data, recipe, plan))
        config = recipe.dataloader
        size = plan.round_size if config.split_batches else plan.micro_batch
        dataset: SeededDataset | SeededStream
        arguments: dict[str, object]
        if self.streamed:
            self._stream = SeededStream(data.train, recipe.seed, config.seed_samples, size)
            dataset = self._stream
            arguments = {"batch_size": size}
        else:
            dataset = SeededDataset(data.train, recipe.seed, config.seed_samples)
            self._sampler = self._make_sampler(dataset, data, size)
            arguments = {"batch_sampler": self._sampler}
        loader = make_loader(dataset, config, accelerator.device.type, data.collate_fn, **arguments)
        # Micro-batches move to the device one at a time, unless they came over the process group.
        sent = self.streamed if config.dispatch_batches is None else config.dispatch_batches
        self.loader = prepare_for(
            accelerator.plan,
            loader,
            loader_index=1,
            put_on_device=sent and recipe.trainer.device_placement,
        )

    def _make_sampler(self, dataset: Sized, data: Data, batch_size: int) -> WindowSampler:
        plan, seed, config = self.plan, self.recipe.seed, self.recipe.dataloader
        order: Any = make_order(dataset, seed, config, data.sampler)
        lengths = [] if data.lengths is None else torch.as_tensor(data.lengths).tolist()
        if config.group_by_length:
            order = SeededOrder(order, seed, lengths, plan.global_batch)
        if (most := self.recipe.trainer.micro_batch_tokens) is not None:
            return TokenSampler(order, lengths, most, plan)
        return WindowSampler(
            order,
            batch_size,
            plan.global_batch,
            plan.steps_per_epoch or 0,
            multiple=plan.round_size if plan.dp_size > 1 else 1,
        )

    def epoch(self, epoch: int, skip_steps: int = 0) -> Generator[Window, None, None]:
        """Yield the windows of an epoch, each with all its micro-batches fetched.

        Args:
            epoch: index of the epoch, from 0.
            skip_steps: how many of its optimizer steps were made already. Of a map-style data set
                nothing is read for them; a stream is read anew up to there.
        """
        # Over-fitting sees the first batches of the first epoch again and again.
        epoch = 0 if self.recipe.trainer.overfit_batches is not None else epoch
        self.loader.generator.manual_seed(mix_seeds(self.recipe.seed, epoch, self.dims.dp_rank))
        self.loader.set_epoch(epoch)
        if self.streamed:
            return self._stream_epoch(skip_steps)
        return self._map_epoch(skip_steps)

    # -- map-style data ------------------------------------------------------------------------

    def _map_epoch(self, skip_steps: int) -> Generator[Window, None, None]:
        total, window = self._sampler.num_samples, self.plan.global_batch
        self._sampler.start = skip_steps
        batches = iter(self.loader)
        try:
            for step in range(skip_steps, -(-total // window)):
                fetched = zip(self._sampler.sizes(step, self.plan), batches, strict=False)
                micro_batches = [self._micro(batch, real, size) for (size, real), batch in fetched]
                yield self._window(micro_batches, min(window, total - step * window))
            next(batches, None)  # lets the loader end its pass
        finally:
            batches.close()

    def _micro(self, batch: object, real: int, size: int) -> MicroBatch:
        """Return this process's micro-batch of `size` samples.

        The micro-batches of all processes begin with `real` samples; others complete them.
        """
        mine = real - self.dims.dp_rank * size
        full = mine >= size or self.plan.dp_size == 1
        return MicroBatch(batch, None if full else torch.arange(size) < mine)

    def _window(self, micro_batches: list[MicroBatch], num_samples: int) -> Window:
        if not self.recipe.trainer.device_placement:
            return Window(micro_batches, num_samples)
        return Window(OnDevice(micro_batches, self.accelerator.device), num_samples)

    # -- streams -------------------------------------------------------------------------------

    def _stream_epoch(self, skip_steps: int) -> Generator[Window, None, None]:
        self._stream.skip = skipped = skip_steps * self.plan.global_batch
        if skipped:
            logger.warning("A stream is resumed by reading its first %d samples again.", skipped)
        left = None if self._stream_steps is None else max(0, self._stream_steps - skip_steps)
        batches = iter(self.loader)
        try:
            yield from itertools.islice(self._stream_windows(batches), left)
        finally:
            batches.close()

    @property
    def _stream_steps(self) -> int | None:
        """How many steps an epoch has at most; None: as many as the stream gives."""
        if self.plan.steps_per_epoch is not None:
            return self.plan.steps_per_epoch
        trainer = self.recipe.trainer
        limits = (trainer.limit_train_batches, trainer.overfit_batches)
        return min((limit for limit in limits if limit is not None), default=None)

    def _stream_windows(self, batches: Iterator[object]) -> Iterator[Window]:
        plan, drop_last = self.plan, self.recipe.trainer.drop_last
        micros = self._stream_micros(batches)
        while fetched := list(itertools.islice(micros, plan.accumulation)):
            samples = sum(real for _, real in fetched)
            if samples == plan.global_batch or not drop_last:
                yield self._window([micro for micro, _ in fetched], samples)

    def _stream_micros(self, batches: Iterator[object]) -> Iterator[tuple[MicroBatch, int]]:
        """Yield this process's micro-batches, each with the real samples on all processes."""
        micro, whole = self.plan.micro_batch, self._round_size
        for batch in batches:
            size, real = micro, whole
            if self.loader.end_of_dataloader:
                size = min(batch_layout.batch_length(batch, micro), micro)
                real = size if self.plan.dp_size == 1 else self.loader.remainder or whole
            yield self._micro(batch, real, size), real


def eval_batches(
    accelerator: Accelerator, data: Data, recipe: Recipe, split: str
) -> dict[str, EvalBatches]:
    """Return the batches of each data set of a split by its name, as `Data.sets` has it."""
    return {
        name: EvalBatches(accelerator, dataset, recipe, data.collate_fn, split, number)
        for number, (name, dataset) in enumerate(data.sets(split).items())
    }


class EvalBatches:
    """The batches of an evaluation on this process, in the order of the data set.

    The last batches are completed to one size on every process; `Accelerator.gather_for_metrics`
    leaves out what completes them. Random draws in the data set are those of epoch 0, so that every
    evaluation sees the same samples; no split ("validation", "test" or "train"), and none of its
    data sets (`number`), draws what another one, or training, draws. `num_batches` on each process
    and `num_samples` of an evaluation are None where they are not known; `loader` is the prepared
    loader.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        dataset: Dataset[object],
        recipe: Recipe,
        collate_fn: Callable[[list[Any]], object] | None = None,
        split: str = "validation",
        number: int = 0,
    ) -> None:
        self.recipe = recipe
        stream = SPLITS.index(split)  # of random draws in the data set
        seed = mix_seeds(recipe.seed, stream) if stream else recipe.seed
        seed = mix_seeds(seed, number) if number else seed
        config, trainer = recipe.dataloader, recipe.trainer
        dims = accelerator.parallel_dims
        size = plan_batches(trainer, dims.dp_size, None).eval_batch
        self._total = size * dims.dp_size
        read_size = self._total if config.split_batches else size
        reader: dict[str, object] = {"batch_size": read_size}
        self.num_batches: int | None = None
        self.num_samples: int | None = None
        self._count(num_samples(dataset))
        seeded: SeededDataset | SeededStream
        if isinstance(dataset, IterableDataset):
            ConfigError.raise_if(worker_problems(dataset, recipe, dims.dp_size))
            seeded = SeededStream(dataset, seed, config.seed_samples, read_size)
        else:
            seeded = SeededDataset(dataset, seed, config.seed_samples)
            reader["sampler"] = SequentialSampler(range(self.num_samples or 0))
        loader = make_loader(seeded, config, accelerator.device.type, collate_fn, **reader)
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=dims.dp_size,
            process_index=dims.dp_rank,
            split_batches=config.split_batches,
            put_on_device=trainer.device_placement,
            dispatch_batches=config.dispatch_batches,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        self.loader: Any = accelerator.strategy.wrap_loader(prepared)

    def samples_within(self, limit: int | None) -> int | None:
        """Return the samples of the first `limit` batches (None: all); None: not known."""
        if limit is None or self.num_samples is None:
            return self.num_samples
        return min(self.num_samples, limit * self._total)

    def size_of(self, batch: object) -> int | None:
        """Return the samples of a batch on this process, those that complete it included."""
        return batch_layout.num_samples(batch, self._total) or None

    def _count(self, length: int | None) -> None:
        limit = self.recipe.trainer.limit_eval_batches
        if length is not None:
            self.num_batches = limited(limit, -(-length // self._total))
            self.num_samples = min(length, self.num_batches * self._total)
        elif isinstance(limit, float):
            raise ConfigError(fraction_problem("limit_eval_batches", limit))
        else:
            self.num_batches = limit

    def __iter__(self) -> Iterator[object]:
        self.loader.generator.manual_seed(self.recipe.seed)
        self.loader.set_epoch(0)
        return itertools.islice(self.loader, self.num_batches)


# -- what the data cannot give -------------------------------------------------------------------


def training_problems(data: Data, recipe: Recipe, plan: BatchPlan) -> Problems:
    """Return what is wrong with training on the training data."""
    streamed, trainer = isinstance(data.train, IterableDataset), recipe.trainer
    problems = worker_problems(data.train, recipe, plan.dp_size) if streamed else Problems()
    problems += order_problems(data, recipe)
    even = recipe.dataloader.even_batches or plan.dp_size == 1
    if not even and (streamed or not trainer.drop_last):
        problems.add(
            f"dataloader.even_batches=false with {'a stream' if streamed else 'several processes'}",
            "processes would run out of samples at different steps",
            "Set dataloader.even_batches=true (what is added is left out of the loss)"
            f"{'' if streamed else ', or trainer.drop_last=true'}.",
        )
    limit = trainer.limit_train_batches
    if streamed and isinstance(limit, float) and plan.steps_per_epoch is None:
        problems.append(fraction_problem("limit_train_batches", limit))
    return problems


def order_problems(data: Data, recipe: Recipe) -> Problems:
    """Return what is wrong with the sampler and the lengths of the training data."""
    problems, config, tokens = Problems(), recipe.dataloader, recipe.trainer.micro_batch_tokens
    needs = ["dataloader.group_by_length=true"] if config.group_by_length else []
    needs += [] if tokens is None else [f"trainer.micro_batch_tokens={tokens}"]
    value, size = " and ".join(needs), num_samples(data.train)
    lengths = 0 if data.lengths is None else len(data.lengths)
    if isinstance(data.train, IterableDataset):
        if needs or data.sampler is not None:
            rule, remedy = "a stream has an order of its own", "Leave it out."
            problems.add(f"{value or 'Data(sampler=…)'} with a stream", rule, remedy)
    elif isinstance(data.sampler, (BatchSampler, DistributedSampler)):
        rule, remedy = "it yields single indices", "Give one that does; the runner divides them."
        problems.add(f"Data(sampler={type(data.sampler).__name__}(…))", rule, remedy)
    elif len(weights := getattr(data.sampler, "weights", range(size or 0))) != size:
        rule = f"it has a weight for each of {size} training samples"
        remedy = "Compute the weights from the training part of the data."
        problems.add(f"Data(sampler=…) with {len(weights)} weights", rule, remedy)
    elif needs and lengths != size:
        rule = f"the data factory tells the length of each of {size} samples"
        problems.add(f"{value} with {lengths} lengths", rule, "Return Data(train=…, lengths=[…]).")
    return problems


def worker_problems(dataset: object, recipe: Recipe, num_processes: int) -> Problems:
    """Return what is wrong with the loader workers that read an iterable data set."""
    config, problems = recipe.dataloader, Problems()
    if config.num_workers and config.persistent_workers:
        problems.add(
            "dataloader.persistent_workers=true with a stream",
            "a worker that lives on does not learn the epoch",
            "Set dataloader.persistent_workers=false.",
        )
    if config.num_workers and config.dispatch_batches is False and num_processes > 1:
        problems.add(
            f"dataloader.dispatch_batches=false with a stream and "
            f"dataloader.num_workers={config.num_workers}",
            "where the stream ends is then known in the worker alone",
            "Leave dispatch_batches=null, or set dataloader.num_workers=0.",
        )
    return problems


def fraction_problem(name: str, limit: float) -> Problem:
    """Return what is wrong with a fraction of a stream of unknown length."""
    return Problem(
        f"trainer.{name}={limit} with a stream of unknown length",
        "a fraction wants a data set that has a length",
        f"Give a number of batches: trainer.{name}=100.",
    )
