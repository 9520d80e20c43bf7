"""Preparing a loader: one that reads the shard of this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, IterDataPipe

from accel.config.checks import check_whole
from accel.data.loaders import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    data_rank,
)
from accel.data.order import generator_of, next_index, order_seed
from accel.data.pass_tracking import PreparedLoader
from accel.data.samplers import (
    BatchSamplerShard,
    CompletedBatchSampler,
    SamplerShard,
    SkipBatchSampler,
    SliceFunction,
    class_name,
    drawing_sampler,
    index_arguments,
    index_sampler,
    loader_arguments,
    split_problems,
    unknown_size,
)
from accel.data.stream import check_split, own_shard, shard_class, uneven_shards, worker_problems
from accel.machine.enums import RNGType
from accel.machine.errors import ConfigError, Problems
from accel.state import PartialState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel.plan.plan import Plan


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFunction | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: DeviceMesh | None = None,
    loader_index: int | None = None,
) -> DataLoader[Any]:
    """Return a loader that yields the batches of one process.

    The caller's sampler and batch sampler stay the ones in use, and draw the same order on every
    process: torch's random samplers from a stream of the loader's own, a generator that the caller
    gave from rank 0's state. Indices of a sampler that is not torch's are drawn by rank 0 for all
    at the start of a pass, unless an attribute `same_on_every_rank` says that they need not be. A
    `DistributedSampler` gives the order of all its ranks.

    An iterable data set yields the same stream on every rank; leave the loader of a stream that
    shards by rank itself unprepared. Of a Hugging Face stream with at least as many shards as there
    are processes, each process reads its own shards, and nothing evens out their numbers of
    samples.

    Args:
        dataloader: the loader to shard; one that is prepared already is returned as it is.
        device: where batches are put; None: where the process state says.
        num_processes: number of shards of the data; None: as the process state says.
        process_index: which of them this one is; None: as the process state says.
        split_batches: whether each batch is cut into a piece per process (its size must divide by
            their number), or full batches are assigned in turn.
        put_on_device: whether batches (nested lists, tuples and mappings of tensors) are put there.
        rng_types: generators that ranks synchronise at the start of each pass: "torch", "cuda",
            "xla", and "generator", that of the sampler or of the iterable data set.
        dispatch_batches: whether only the main process reads and gives the others their slices;
            None: where several processes read an iterable data set.
        even_batches: whether the last batches are completed from the beginning of the data, so that
            each process has as many. Batch samplers whose batches vary in size want False.
        slice_fn_for_dispatch: cuts a dispatched batch, as ``f(batch, slice, process_index=…,
            num_processes=…)``; None: tensors and arrays along dim 0, and lists of plain objects.
        use_seedable_sampler: whether random samplers are replaced by `SeedableRandomSampler`.
        data_seed: its seed, and that of the loader's own stream, mixed with `loader_index`; None:
            the initial seed of the sampler's generator, or of torch's. Where all ranks read, that
            of the stream is then drawn from torch's generator on rank 0.
        non_blocking: whether copies to the device overlap with computation (wants pinned memory).
        use_stateful_dataloader: whether the loader is torchdata's `StatefulDataLoader`.
        torch_device_mesh: ranks along its axes "tp", "cp", "sp" and "pp" read the same data.
        loader_index: how many loaders were prepared before, which draw permutations of their own;
            None: counted, or 0 where `data_seed`, `num_processes` or `process_index` is given.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`; both are torch loaders.

    Raises:
        ConfigError: if batches cannot be split, or would be read repeatedly by several workers; if
            the sampler shards already, or differs between ranks; if a data set of Hugging Face is
            split by node. Where each process reads, from the loader when it is read or its length
            is wanted: if batches cannot be split, as their sampler has no `batch_size`.
        MissingPackageError: if a stateful loader is requested and torchdata is not installed.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    state = PartialState()
    if loader_index is None:
        explicit = (data_seed, num_processes, process_index) != (None, None, None)
        loader_index = 0 if explicit else next_index(state.comm)
    index, count = data_rank(state, torch_device_mesh)
    count = count if num_processes is None else num_processes
    index = index if process_index is None else process_index
    streamed = isinstance(dataloader.dataset, IterableDataset)
    dispatched = streamed and count > 1 if dispatch_batches is None else bool(dispatch_batches)
    _check(dataloader, count, split_batches, dispatched)

    from accel.data.order_across_ranks import Ordering

    ordering = Ordering(state, count, dispatched, use_seedable_sampler, data_seed, loader_index)
    sampler, order = ordering.of(dataloader)
    sharding = _Sharding(count, index, dispatched, split_batches, even_batches)
    dataset, sampler, arguments = sharding.of(dataloader, sampler)
    generator = _generator(dataset, sampler) or order.stream
    arguments = {"_drop_last": _drops_last(dataloader), **arguments}
    arguments.update(
        device=(state.device if device is None else device) if put_on_device else None,
        rng_types=_usable(rng_types, generator, state.num_processes > 1 and not streamed),
        synchronized_generator=generator,
        use_stateful_dataloader=use_stateful_dataloader,
        _non_blocking=non_blocking,
        torch_device_mesh=torch_device_mesh,
    )
    prepared: PreparedLoader
    if not dispatched:
        prepared = DataLoaderShard(dataset, **arguments)
    else:
        if arguments["generator"] is None and count > 1:
            # Only the main process makes iterators; their base seed must not come from torch's own
            # generator, or that of the ranks would drift apart.
            seed = order_seed(None, None, loader_index)
            arguments["generator"] = torch.Generator().manual_seed(seed)
        prepared = DataLoaderDispatcher(
            dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            even_batches=even_batches,
            num_processes=count,
            process_index=index,
            **arguments,
        )
    prepared._order = order
    return prepared


def prepare_for(plan: Plan, loader: DataLoader[Any], **options: Any) -> Any:
    """Return a loader that yields this rank's batches of the run of `plan`.

    `options` are arguments of `prepare_data_loader` that the plan does not decide.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    dims, config = plan.parallel_dims, plan.dataloader
    return prepare_data_loader(
        loader,
        plan.device,
        num_processes=dims.dp_size,
        process_index=dims.dp_rank,
        split_batches=config.split_batches,
        rng_types=list(plan.rng_types),
        dispatch_batches=config.dispatch_batches,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
        **options,
    )


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader like `dataloader` without its first `num_batches` batches.

    Of a map-style data set nothing is fetched for them; a stream is read and passed over. Epochs
    are counted together with `dataloader`, which continues where the new loader ends.

    Args:
        dataloader: any torch loader, prepared or not.
        num_batches: number of batches of this process that are skipped.

    Raises:
        ConfigError: if `num_batches` is negative, or no whole number.
    """
    check_whole(num_batches, "num_batches", "Give how many to skip.")
    if num_batches < 0:
        raise ConfigError.of(
            f"num_batches={num_batches}", "it is at least 0", "Give how many to skip."
        )
    if num_batches == 0:
        return dataloader
    if isinstance(dataloader, PreparedLoader):
        return dataloader._skipping(num_batches)
    arguments = loader_arguments(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        skipped = num_batches + getattr(dataloader, "skip_batches", 0)
        return SkipDataLoader(dataloader.dataset, skip_batches=skipped, **arguments)
    sampler = SkipBatchSampler(index_sampler(dataloader), num_batches)
    return DataLoader(dataloader.dataset, **arguments, **index_arguments(dataloader, sampler))


def _check(
    dataloader: DataLoader[object], count: int, split_batches: bool, dispatched: bool
) -> None:
    problems = Problems()
    size = _size(dataloader)
    if split_batches and size is not None:
        problems += split_problems(size, count)
    elif split_batches and dispatched and count > 1 and dataloader.batch_sampler is not None:
        problems += [unknown_size(class_name(dataloader.batch_sampler))]
    if isinstance(dataloader.dataset, IterableDataset):
        problems += worker_problems(
            dataloader.dataset, dataloader.num_workers, dataloader.worker_init_fn
        )
    if isinstance(dataloader.dataset, IterDataPipe) and count > 1:
        problems.add(
            f"a data pipe of torch for {count} processes",
            "torch's loader shares the seed of its shuffles in a collective of its own, and "
            "shares it out by worker, only where every rank reads the pipe itself",
            "Read it in the `__iter__` of an `IterableDataset` that seeds it alike on every "
            "rank (torch.utils.data.graph_settings), or leave the loader out of `prepare`.",
        )
    problems.raise_if()
    kind = type(dataloader)
    if kind.__iter__ not in (DataLoader.__iter__, SkipDataLoader.__iter__):
        warnings.warn(
            f"{kind.__name__} has an `__iter__` of its own, which the prepared loader does not "
            "use: it reads the same data set with the same samplers and `collate_fn`.",
            stacklevel=3,
        )


def _size(dataloader: DataLoader[object]) -> int | None:
    return dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)


def _drops_last(dataloader: DataLoader[object]) -> bool:
    inner = getattr(index_sampler(dataloader), "drop_last", False)
    return bool(dataloader.drop_last or inner)


@dataclass(frozen=True)
class _Sharding:
    """Which samples this process reads."""

    count: int
    index: int
    dispatched: bool
    split_batches: bool
    even_batches: bool

    def of(
        self, loader: DataLoader[object], sampler: Any
    ) -> tuple[Dataset[object], Any, dict[str, Any]]:
        """Return data set and index sampler of this process, and the arguments of its loader."""
        arguments = loader_arguments(loader)
        if not isinstance(loader.dataset, IterableDataset):
            sampler = self._sampler(loader, sampler)
            return loader.dataset, sampler, arguments | index_arguments(loader, sampler)
        if self.count == 1:
            return loader.dataset, sampler, arguments
        if self.dispatched:
            check_split(loader.dataset)
            return loader.dataset, sampler, arguments
        part = own_shard(loader.dataset, self.count, self.index)
        if part is not None:  # each process has other samples, none of them a repetition
            if self.even_batches:
                warnings.warn(str(uneven_shards(loader.dataset)), stacklevel=3)
            return part, sampler, arguments | {"_drop_last": True}
        shard = shard_class(loader.dataset)(
            loader.dataset,
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            num_processes=self.count,
            process_index=self.index,
            split_batches=self.split_batches and loader.batch_size is not None,
            even_batches=self.even_batches,
        )
        arguments["batch_size"] = loader.batch_size and shard.round_size // self.count
        return shard, sampler, arguments

    def _sampler(self, loader: DataLoader[object], sampler: Any) -> Any:
        if self.count == 1:
            return sampler
        if self.dispatched:
            completes = self.even_batches and not _drops_last(loader) and _size(loader)
            return CompletedBatchSampler(sampler, self.count) if completes else sampler
        # The caller's, as one that ranks agree on is a batch sampler by class.
        if loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler):
            return SamplerShard(sampler, self.count, self.index, self.even_batches)
        return BatchSamplerShard(
            sampler, self.count, self.index, self.split_batches, self.even_batches
        )


def _generator(dataset: object, sampler: object) -> torch.Generator | None:
    """Return the generator that "generator" in `rng_types` means, if there is one."""
    if isinstance(dataset, IterableDataset):
        return generator_of(dataset)
    found = getattr(drawing_sampler(sampler), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _usable(
    rng_types: Iterable[str | RNGType] | None, generator: torch.Generator | None, shared: bool
) -> list[str | RNGType] | None:
    """Return the `rng_types` that there are, with the one that a `shared` order is drawn from."""
    found = [kind for kind in rng_types or () if generator is not None or kind != RNGType.GENERATOR]
    if shared and generator is not None and RNGType.GENERATOR not in found:
        found.append(RNGType.GENERATOR)
    return None if rng_types is None and not found else found
