"""The `Accelerator`: it owns the state of a run; strategy, precision and transport do the work."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from accel._checkpoint_api import CheckpointAPI
from accel._prepare_api import PrepareAPI
from accel._process_api import ProcessAPI
from accel._step_api import StepAPI, Windows
from accel._tracking_api import TrackingAPI
from accel.config.handlers import KwargsHandler, ProfileKwargs
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.enums import DynamoBackend, PrecisionType, RNGType
from accel.parallel import ParallelDims
from accel.planning.arguments import Arguments
from accel.planning.plan import Plan, resolve
from accel.precision.build import build_precision
from accel.prepared import Objects
from accel.state import AcceleratorState, GradientState, current_environment, settled_arguments
from accel.strategies.table import build_strategy
from accel.trackers.base import GeneralTracker
from accel.trackers.table import Wanted, filter_trackers


class Accelerator(ProcessAPI, PrepareAPI, StepAPI, TrackingAPI, CheckpointAPI):
    """One run: its processes, device, precision, and the objects it trains.

    Args:
        device_placement: whether prepared objects and batches are moved to the device.
        split_batches: older spelling of `DataLoaderConfiguration.split_batches`.
        mixed_precision: no, fp16, bf16 or fp8; None: ACCELERATE_MIXED_PRECISION, else no.
        gradient_accumulation_steps: micro-batches per optimizer step; where it is 1,
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS holds.
        cpu: whether accelerators are ignored.
        dataloader_config: how prepared loaders divide batches over processes.
        deepspeed_plugin: DeepSpeed, in one plugin or several by name.
        fsdp_plugin: fully sharded training.
        megatron_lm_plugin: not built yet.
        rng_types: generators that processes synchronise at the start of each pass over a loader:
            torch, cuda, xla, generator; None: generator.
        log_with: trackers: tensorboard, "all", or a `GeneralTracker` of your own; one or several.
        project_dir: folder for states and logs.
        project_config: the same, in detail.
        gradient_accumulation_plugin: accumulation in detail.
        step_scheduler_with_optimizer: whether schedulers step when their optimizer does; if not,
            whenever their `step` is called.
        kwargs_handlers: how objects of torch are created, at most one handler of a kind.
        dynamo_backend: backend of `torch.compile`.
        deepspeed_plugins: alias of `deepspeed_plugin`.
        torch_tp_plugin: tensor parallelism.
        dynamo_plugin: compilation in detail.
        device: "cpu", "cuda", …; None or "auto": the machine's accelerator, else the CPU.
        logging_dir: older spelling of `ProjectConfiguration.logging_dir`.
        dispatch_batches, even_batches, use_seedable_sampler: older spellings of the fields of
            `DataLoaderConfiguration`.
        kwarg_handler: older spelling of `kwargs_handlers`.

    Attributes:
        state: who this process is, and what the run was set up with.
        gradient_state: where gradient accumulation stands.
        plan: everything decided, frozen.
        comm: how processes talk.
        precision: the number format.
        strategy: how the model is distributed.
        scaler: the gradient scaler of fp16, or None.
        device: where this process computes.
        step: micro-batches since the end of the last pass over a loader.
        trackers: those that `init_trackers` opened.

    Raises:
        ConfigError: naming everything that contradicts itself or the machine.

    Example:
        >>> accelerator = Accelerator(gradient_accumulation_steps=2)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for inputs, targets in loader:
        ...     with accelerator.accumulate(model):
        ...         loss = loss_function(model(inputs), targets)
        ...         accelerator.backward(loss)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Wanted | Iterable[Wanted] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        deepspeed_plugins: Any = None,
        *,
        torch_tp_plugin: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        device: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        kwarg_handler: Sequence[KwargsHandler] | None = None,
    ) -> None:
        arguments = Arguments(
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            device=device,
            dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            rng_types=rng_types,
            project_dir=project_dir,
            logging_dir=logging_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=[*(kwargs_handlers or ()), *(kwarg_handler or ())],
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugins,
            torch_tp_plugin=torch_tp_plugin,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
        )
        plan = resolve(settled_arguments(arguments), current_environment())
        self.log_with = filter_trackers(log_with, plan.project.logging_dir)
        self._set_up(plan, cpu)

    @property
    def parallel_dims(self) -> ParallelDims:
        """Sizes of the parallel axes, this process's rank on them, and what follows from them."""
        return self.plan.parallel_dims

    def _set_up(self, plan: Plan, cpu: bool) -> None:
        self.state = AcceleratorState(cpu=cpu, _from_accelerator=True, _plan=plan)
        self.plan = self.state.settle(plan)
        self.comm = self.state.comm
        self.device = self.state.device
        self.gradient_state = GradientState(self.plan.accumulation)
        self._windows = Windows(self.gradient_state)
        self.precision = build_precision(self.plan)
        self.strategy = build_strategy(self.plan, self.comm, self.device, self.precision)
        self.scaler = self.strategy.scaler
        self.device_placement = self.plan.device_placement
        self.trackers: list[GeneralTracker] = []
        self._objects = Objects()
        self._divides_loss = not self.strategy.traits.owns_accumulation

    # -- what was decided ----------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """The number format of a step: no, fp16 or bf16."""
        return self.precision.name

    @property
    def split_batches(self) -> bool:
        """Whether loaders split their batches over processes."""
        return self.plan.dataloader.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; None: for streams alone."""
        return self.plan.dataloader.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether last batches are completed, so that each process has as many."""
        return self.plan.dataloader.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether random samplers draw an order that depends on seed and epoch alone."""
        return self.plan.dataloader.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device overlap with computation."""
        return self.plan.dataloader.non_blocking

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step when their optimizer does."""
        return self.plan.step_scheduler_with_optimizer

    @property
    def rng_types(self) -> tuple[str, ...]:
        """The generators that processes synchronise."""
        return self.plan.rng_types

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where states and logs go."""
        return self.plan.project

    @property
    def project_dir(self) -> str | None:
        """The folder of the run."""
        return self.plan.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of the trackers."""
        return self.plan.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.plan.project.iteration

    # -- around the run ------------------------------------------------------------------------

    @contextlib.contextmanager
    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> Iterator[torch.profiler.profile]:
        """Profile the code inside the context.

        Args:
            profile_handler: takes the place of the run's own. With `output_trace_dir`, each process
                writes ``profile_<rank>.json`` there (Chrome's format), and one per further cycle.

        Yields:
            The profiler; with a schedule, call its `step` after each step.
        """
        handler = profile_handler or self.plan.profile
        if handler.output_trace_dir is not None:
            exports = _TraceFiles(Path(handler.output_trace_dir), self.process_index)
            exports.also = handler.on_trace_ready
            handler = dataclasses.replace(handler, on_trace_ready=exports)
        with handler.build() as profiler:
            yield profiler

    def end_training(self) -> None:
        """Close the trackers and leave the process group, after everything under way is done.

        Call it on every process at the end of a script; nothing can be exchanged afterwards.
        """
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self.strategy.release()
        self.comm.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{self.state!r}"


class _TraceFiles:
    """Called by the profiler at the end of each cycle: writes one Chrome trace.

    Args:
        folder: where.
        rank: index of the process, part of the names.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.cycles = 0
        self.also: Callable[[torch.profiler.profile], None] | None = None

    def __call__(self, profiler: torch.profiler.profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        cycle = f"_{self.cycles}" if self.cycles else ""
        profiler.export_chrome_trace(str(self.folder / f"profile_{self.rank}{cycle}.json"))
        self.cycles += 1
        if self.also is not None:
            self.also(profiler)
