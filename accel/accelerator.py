"""The `Accelerator`: it owns the state of a run; strategy, precision and transport do the work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel._delegate import connect, delegate
from accel.checkpoint.contents import RunObjects
from accel.checkpoint.session import CheckpointSession
from accel.comm.processes import ProcessControl
from accel.config.handlers import AutocastKwargs, KwargsHandler, ProfileKwargs, check_handler
from accel.config.parallelism import ParallelismConfig
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.logging import get_logger
from accel.machine.enums import DynamoBackend, PrecisionType, RNGType
from accel.optimizer import AcceleratedOptimizer
from accel.plan.arguments import ONE_BY_DEFAULT, Arguments
from accel.plan.plan import Plan, resolve
from accel.precision.build import build_precision
from accel.run import profiling
from accel.run.accumulation import Accumulation
from accel.run.collectives import Collectives
from accel.run.preparation import Preparation
from accel.run.settings import RunSettings
from accel.scheduler import AcceleratedScheduler
from accel.state import AcceleratorState, GradientState, current_environment, settled_arguments
from accel.strategies.base import strategy_class
from accel.strategies.objects import Objects
from accel.trackers.base import GeneralTracker
from accel.trackers.group import TrackerGroup
from accel.trackers.table import Choice, Wanted, filter_trackers

logger = get_logger(__name__)


class Accelerator(ProcessControl, RunSettings):
    """One run: its processes, device, precision, and the objects it trains.

    Args:
        device_placement: whether prepared objects and batches are moved to the device.
        split_batches: older spelling of `DataLoaderConfiguration.split_batches`.
        mixed_precision: no, fp16, bf16 or fp8; None: ACCELERATE_MIXED_PRECISION, else no.
        gradient_accumulation_steps: micro-batches per optimizer step; where it is 1,
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS holds. All Accelerators of a process share the
            number: a later one that does not give it keeps that of the earlier.
        cpu: whether accelerators are ignored.
        dataloader_config: how prepared loaders divide batches over processes.
        deepspeed_plugin: DeepSpeed, in one plugin or several by name.
        fsdp_plugin: fully sharded training.
        megatron_lm_plugin: not built yet.
        rng_types: generators that processes synchronise at the start of each pass over a loader:
            torch, cuda, xla, generator; None: generator.
        log_with: trackers: names of `LoggerType`, "all", or a `GeneralTracker` of your own; one or
            several.
        project_dir: folder for states and logs.
        project_config: the same, in detail.
        gradient_accumulation_plugin: accumulation in detail.
        step_scheduler_with_optimizer: whether schedulers step when their optimizer does; if not,
            whenever their `step` is called.
        kwargs_handlers: how objects of torch are created, at most one handler of a kind.
        dynamo_backend: backend of `torch.compile`.
        deepspeed_plugins: alias of `deepspeed_plugin`.
        torch_tp_plugin: tensor parallelism.
        parallelism_config: sizes of the parallel axes.
        strategy_plugins: plugins of strategies, known by their classes: those of other packages.
        dynamo_plugin: compilation in detail.
        device: "cpu", "cuda", …; None or "auto": the machine's accelerator, else the CPU.
        logging_dir: older spelling of `ProjectConfiguration.logging_dir`.
        dispatch_batches, even_batches, use_seedable_sampler: older spellings of the fields of
            `DataLoaderConfiguration`.
        kwarg_handler: older spelling of `kwargs_handlers`.

    Attributes:
        state: who this process is, and what the run was set up with.
        plan: everything decided, frozen.
        comm: how processes talk.
        device: where this process computes.
        precision: the number format.
        strategy: how the model is distributed.
        preparation: prepares objects, and holds them.
        accumulation: windows of micro-batches, backward passes, clipping.
        collectives: gathering and reducing over processes.
        checkpoints: saves and restores the run.
        tracker_group: the experiment trackers.

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
        gradient_accumulation_steps: int = ONE_BY_DEFAULT,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: object = None,
        fsdp_plugin: object = None,
        megatron_lm_plugin: object = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Wanted | Iterable[Wanted] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        deepspeed_plugins: object = None,
        *,
        torch_tp_plugin: object = None,
        parallelism_config: ParallelismConfig | None = None,
        strategy_plugins: Sequence[object] = (),
        dynamo_plugin: TorchDynamoPlugin | None = None,
        device: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        kwarg_handler: Sequence[KwargsHandler] | None = None,
    ) -> None:
        plan = resolve(settled_arguments(Arguments.of(locals())), current_environment())
        chosen = filter_trackers(log_with, plan.project.logging_dir)
        self._set_up(plan, cpu, chosen)
        for note in plan.notes:
            logger.warning(note)
        if any(name.startswith("ACCELERATE_") for name in plan.environment.variables):
            from accel.plan import misspelt_variables

            for note in misspelt_variables.notes(plan.environment.variables):
                logger.warning_once("%s", note)
        connect(self, Accelerator, per_step=("accumulate", "backward"))

    def _set_up(self, plan: Plan, cpu: bool, trackers: list[Choice]) -> None:
        self.state = AcceleratorState(cpu=cpu, _from_accelerator=True, _plan=plan)
        self.plan = plan = self.state.settle(plan)
        self.comm = self.state.comm
        self.device = self.state.device
        self.precision = build_precision(plan)
        kind = strategy_class(plan.spec)  # imported only where it is chosen
        self.strategy = kind(plan, self.comm, self.device, self.precision)
        objects = Objects()
        self.accumulation = Accumulation(plan, self.strategy, objects)
        self.preparation = Preparation(plan, self.strategy, self.accumulation, objects)
        self.collectives = Collectives(plan, self.comm, self.gradient_state)
        self.tracker_group = TrackerGroup(trackers, self.logging_dir, self.is_main_process)
        self.checkpoints = CheckpointSession(
            RunObjects(
                plan, self.comm, self.strategy, objects, self.accumulation, self.tracker_group
            )
        )

    # -- preparing -----------------------------------------------------------------------------

    prepare = delegate("preparation", Preparation.prepare)
    prepare_model = delegate("preparation", Preparation.prepare_model)
    prepare_optimizer = delegate("preparation", Preparation.prepare_optimizer)
    prepare_scheduler = delegate("preparation", Preparation.prepare_scheduler)
    prepare_data_loader = delegate("preparation", Preparation.prepare_data_loader)
    unwrap_model = delegate("preparation", Preparation.unwrap_model)
    skip_first_batches = delegate("preparation", Preparation.skip_first_batches)
    verify_device_map = delegate("preparation", Preparation.verify_device_map)
    free_memory = delegate("preparation", Preparation.free_memory)
    clear = delegate("preparation", Preparation.clear)

    # -- the step ------------------------------------------------------------------------------

    accumulate = delegate("accumulation", Accumulation.accumulate)
    no_sync = delegate("accumulation", Accumulation.no_sync)
    trigger_sync_in_backward = delegate("accumulation", Accumulation.trigger_sync_in_backward)
    join_uneven_inputs = delegate("accumulation", Accumulation.join_uneven_inputs)
    backward = delegate("accumulation", Accumulation.backward)
    forward_backward = delegate("accumulation", Accumulation.forward_backward)
    lomo_backward = delegate("accumulation", Accumulation.lomo_backward)
    unscale_gradients = delegate("accumulation", Accumulation.unscale_gradients)
    clip_grad_norm_ = delegate("accumulation", Accumulation.clip_grad_norm_)
    clip_grad_value_ = delegate("accumulation", Accumulation.clip_grad_value_)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[object]:
        """Return a context that computes in the run's precision, as prepared models do anyway.

        Args:
            autocast_handler: takes the place of the run's own, for instance
                ``AutocastKwargs(enabled=False)`` to compute in fp32.

        Raises:
            ConfigError: for a handler of another kind.
        """
        check_handler(autocast_handler, AutocastKwargs, "autocast")
        return self.precision.autocast(autocast_handler)

    # -- collectives ---------------------------------------------------------------------------

    gather = delegate("collectives", Collectives.gather)
    gather_for_metrics = delegate("collectives", Collectives.gather_for_metrics)
    reduce = delegate("collectives", Collectives.reduce)
    pad_across_processes = delegate("collectives", Collectives.pad_across_processes)
    set_trigger = delegate("collectives", Collectives.set_trigger)
    check_trigger = delegate("collectives", Collectives.check_trigger)
    check_breakpoint = delegate("collectives", Collectives.check_breakpoint)

    # -- checkpoints ---------------------------------------------------------------------------

    save_state = delegate("checkpoints", CheckpointSession.save_state)
    load_state = delegate("checkpoints", CheckpointSession.load_state)
    register_for_checkpointing = delegate(
        "checkpoints", CheckpointSession.register_for_checkpointing
    )
    register_save_state_pre_hook = delegate(
        "checkpoints", CheckpointSession.register_save_state_pre_hook
    )
    register_load_state_pre_hook = delegate(
        "checkpoints", CheckpointSession.register_load_state_pre_hook
    )
    save = delegate("checkpoints", CheckpointSession.save)
    save_model = delegate("checkpoints", CheckpointSession.save_model)
    save_native = delegate("checkpoints", CheckpointSession.save_native)
    load_native = delegate("checkpoints", CheckpointSession.load_native)
    get_state_dict = delegate("checkpoints", CheckpointSession.get_state_dict)

    # -- trackers ------------------------------------------------------------------------------

    init_trackers = delegate("tracker_group", TrackerGroup.init_trackers)
    get_tracker = delegate("tracker_group", TrackerGroup.get_tracker)
    log = delegate("tracker_group", TrackerGroup.log)
    log_images = delegate("tracker_group", TrackerGroup.log_images)

    @property
    def log_with(self) -> list[Choice]:
        """The chosen trackers: classes, or instances; what is set holds for `init_trackers`."""
        return self.tracker_group.log_with

    @log_with.setter
    def log_with(self, log_with: Wanted | Iterable[Wanted] | None) -> None:
        self.tracker_group.log_with = filter_trackers(log_with, self.logging_dir)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` opened."""
        return self.tracker_group.trackers

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self.tracker_group.trackers = trackers

    # -- where the run stands ------------------------------------------------------------------

    @property
    def gradient_state(self) -> GradientState:
        """Where gradient accumulation stands."""
        return self.accumulation.gradient_state

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16, or None."""
        return self.accumulation.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.accumulation.scaler = scaler

    @property
    def device_placement(self) -> bool:
        """Whether objects that are prepared from now on, and batches, are moved to the device."""
        return self.accumulation.device_placement

    @device_placement.setter
    def device_placement(self, device_placement: bool) -> None:
        self.accumulation.device_placement = device_placement

    @property
    def gradient_accumulation_steps(self) -> int:
        """The micro-batches of an optimizer step."""
        return self.accumulation.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self.accumulation.gradient_accumulation_steps = num_steps

    @property
    def step(self) -> int:
        """The micro-batches since the end of the last pass over a loader."""
        return self.accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self.accumulation.step = step

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends an optimizer step."""
        return self.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.accumulation.sync_gradients = sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last step was skipped because gradients overflowed."""
        return self.accumulation.optimizer_step_was_skipped

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer updates weights in the backward pass, as LOMO does."""
        return self.accumulation.has_lomo_optimizer

    @property
    def flag_tensor(self) -> torch.Tensor:
        """[1] 1 where this process set its trigger since the last check, else 0."""
        return self.collectives.flag_tensor

    @property
    def _models(self) -> list[torch.nn.Module]:
        return self.preparation.objects.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self.preparation.objects.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self.preparation.objects.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.preparation.objects.dataloaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self.preparation.objects.custom

    # -- around the run ------------------------------------------------------------------------

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Return a context whose code is profiled.

        Args:
            profile_handler: takes the place of the run's own. With `output_trace_dir`, each process
                writes ``profile_<rank>.json`` there (Chrome's format), and one per further cycle.

        Returns:
            The context of the profiler; with a schedule, call its `step` after each step.

        Raises:
            ConfigError: for a handler of another kind.
        """
        check_handler(profile_handler, ProfileKwargs, "profile")
        return profiling.profile(profile_handler or self.plan.profile, self.process_index)

    def end_training(self) -> None:
        """Close the trackers and leave the process group, after everything under way is done.

        Call it on every process at the end of a script; nothing can be exchanged afterwards.
        """
        self.tracker_group.finish()
        self.strategy.close()
        self.comm.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{self.state!r}"
