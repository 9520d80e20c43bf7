"""The `Accelerator`: it owns the state of a run; strategy, precision and transport do the work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

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
from accel.machine.imports import load_attribute
from accel.optimizer import AcceleratedOptimizer
from accel.plan.arguments import ONE_BY_DEFAULT, Arguments
from accel.plan.plan import resolve
from accel.precision.build import build_precision
from accel.run import profiling
from accel.run.accumulation import Accumulation
from accel.run.collectives import Collectives
from accel.run.preparation import Preparation
from accel.run.settings import RunSettings
from accel.scheduler import AcceleratedScheduler
from accel.state import AcceleratorState, current_environment, settled_arguments
from accel.strategies.base import Objects, Strategy
from accel.trackers.base import GeneralTracker
from accel.trackers.group import TrackerGroup
from accel.trackers.table import Choice, Wanted, filter_trackers

logger = get_logger(__name__)


class Accelerator(
    ProcessControl, RunSettings, Preparation, Accumulation, Collectives, CheckpointSession
):
    """One run: its processes, device, precision, and the objects it trains.

    Its methods are those of the base classes, one for each subject, which call each other by
    `self`: a subclass that overrides one of them changes the others.

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
        megatron_lm_plugin: training by megatron-core.
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
        device_placement: whether objects that are prepared from now on, and batches, are moved to
            the device.
        gradient_state: where gradient accumulation stands.
        scaler: the gradient scaler of fp16, or None.
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
        arguments = Arguments(
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            device=device,
            dataloader_config=dataloader_config,
            plugins={
                "deepspeed_plugin": deepspeed_plugin,
                "deepspeed_plugins": deepspeed_plugins,
                "fsdp_plugin": fsdp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "torch_tp_plugin": torch_tp_plugin,
            },
            strategy_plugins=strategy_plugins,
            rng_types=rng_types,
            project_dir=project_dir,
            logging_dir=logging_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            kwarg_handler=kwarg_handler,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            parallelism_config=parallelism_config,
        )
        plan = resolve(settled_arguments(arguments), current_environment())
        chosen = filter_trackers(log_with, plan.project.logging_dir)
        self.state = AcceleratorState(cpu=cpu, _from_accelerator=True, _plan=plan)
        self.plan = plan = self.state.settle(plan)
        self.comm = self.state.comm
        self.device = self.state.device
        self.precision = build_precision(plan)
        kind: type[Strategy] = load_attribute(plan.spec.place)  # imported only where it is chosen
        self.strategy = kind(plan, self.comm, self.device, self.precision)
        self._objects = Objects()
        self._start_accumulation()
        self._start_collectives()
        self.tracker_group = TrackerGroup(chosen, self.logging_dir, self.is_main_process)
        self._start_checkpoints(self.tracker_group)
        for note in plan.notes:
            logger.warning(note)

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

    # -- trackers ------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, object] | None = None,
        init_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Open a run in every tracker of `log_with`, and record the hyper-parameters.

        Runs that are open are closed first. After `load_state`, the trackers continue the runs that
        the checkpoint names, unless `init_kwargs` name others. Runs that no `end_training` closes
        are closed at the exit of the process, after an exception too. One that ends with
        `sys.exit(3)` is closed as a success: Python does not tell that code at exit. Raise an
        exception instead.

        Args:
            project_name: name of the run or project, as the tracker takes it.
            config: hyper-parameters; may be nested.
            init_kwargs: arguments of each tracker by its name, e.g.
                ``{"tensorboard": {"flush_secs": 10}}``. Those of a tracker that `log_with` does
                not choose take no effect.

        Raises:
            ConfigError: if `init_kwargs` has a name that no tracker has, or an argument that it
                does not take.
        """
        self.tracker_group.open(project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker of this run.

        Args:
            name: its name, e.g. "tensorboard".
            unwrap: whether to return the object of the tracking library instead.

        Returns:
            The tracker. On a process where it does not log: one whose methods do nothing, or None
            for `unwrap`.

        Raises:
            ConfigError: if no tracker of that name is used.
            StateError: before `init_trackers`.
        """
        return self.tracker_group.get(name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values in every tracker.

        Args:
            values: by name: numbers, 0-d tensors, text or dicts of numbers.
            step: optimizer step.
            log_kwargs: arguments of each tracker's own call, by its name; as `init_kwargs`.

        Raises:
            ConfigError: if `log_kwargs` has a name that no tracker has.
            Exception: that of the first tracker that fails, after all others have the values.
        """
        self.tracker_group.log(values, step, log_kwargs or {})

    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record images in every tracker that has them.

        Args:
            values: by name: images [N, C, H, W], or as the trackers take them.
            step: optimizer step.
            log_kwargs: arguments of each tracker's own call, by its name; as `init_kwargs`.

        Raises:
            ConfigError: if `log_kwargs` has a name that no tracker has.
            NotImplementedError: if none of the trackers has images.
        """
        self.tracker_group.log_images(values, step, log_kwargs or {})

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

    # -- prepared objects, by the names that libraries know ------------------------------------

    @property
    def _models(self) -> list[torch.nn.Module]:
        return self._objects.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._objects.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._objects.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._objects.dataloaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self._objects.custom

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
