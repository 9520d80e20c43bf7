"""The DeepSpeed strategy: an engine holds model, optimizer and precision, and makes the step.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch.distributed.device_mesh import init_device_mesh

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_json import Config
from accel.machine.errors import ConfigError
from accel.plan.dims import CP, DP_SHARD
from accel.precision.base import COMPUTE_DTYPES
from accel.scheduler import wrap_scheduler
from accel.state import GradientState
from accel.strategies.base import Objects, Strategy, refuse_copies
from accel.strategies.compile import compile_model
from accel.strategies.context_parallel import ContextParallel
from accel.strategies.deepspeed import initialize
from accel.strategies.deepspeed.fragments import share_weights, undo_first_step
from accel.strategies.deepspeed.settings import (
    Settings,
    check_devices,
    check_kind,
    check_optimizer,
    object_problems,
    plan_problems,
    two_models,
)
from accel.strategies.deepspeed.state import ZeroState
from accel.strategies.deepspeed.wrappers import (
    SCALES,
    DeepSpeedEngineWrapper,
    DeepSpeedGradients,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DeepSpeedSync,
    DummyScheduler,
    TrainedEngine,
    backward_problems,
    scaled,
)

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.precision.base import Precision


@final
class DeepSpeedStrategy(Strategy):
    """ZeRO: optimizer state, gradients and parameters are sharded, by the plugin's stage."""

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        ConfigError.raise_if(plan_problems(plan))
        plugins = plan.plugin("deepspeed").values()
        formats = {n: {"enabled": plan.mixed_precision == n} for n in ("bf16", "fp16")}
        for plugin in plugins:  # documented: "auto" reads as the run's value from here on
            plugin.resolve(formats)
        self.package = initialize.import_deepspeed(device)
        comm.before_exit(self._leave_group)
        self._trained = TrainedEngine(plan)
        if (dims := plan.parallel_dims).cp > 1:
            mesh = init_device_mesh(
                device.type, (dims.dp_size, dims.cp), mesh_dim_names=(DP_SHARD, CP)
            )
            self.context_parallel = ContextParallel(mesh[CP])
        self.sync: DeepSpeedSync = DeepSpeedSync()
        self.gradients = DeepSpeedGradients(self._trained)
        self.state = ZeroState(self._trained, comm, self.package)
        self._active_config: initialize.ActiveConfig | None = initialize.ActiveConfig(
            self._is_partitioned_by_transformers, self._partitioned_init_config, plan.local_rank
        )
        has_stage_3 = any(plugin.stage == 3 for plugin in plugins)
        initialize.register(self._active_config, has_stage_3)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        return self._trained.plugin

    @property
    def wrapped_engine(self) -> DeepSpeedEngineWrapper | None:
        optimizer = self._trained.optimizer()
        return None if optimizer is None else DeepSpeedEngineWrapper(optimizer.engine)

    # -- building models -------------------------------------------------------------------

    def init_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which models are built: partitioned, if the plugin says so."""
        if not (self.plugin.given("zero3_init_flag") and self.plugin.stage == 3):
            return contextlib.nullcontext()
        return initialize.partitioned_init(self.package, self._settings_without_model(), self.plan)

    def _is_partitioned_by_transformers(self) -> bool:
        plugin, flag = self.plugin, self.plugin.given("zero3_init_flag")
        return not self.comm.closed and plugin.stage == 3 and flag is not False

    def _partitioned_init_config(self) -> Config:
        initialize.join_group(self.package, self.plan)
        return self._settings_without_model().config

    def _settings_without_model(self) -> Settings:
        settings = Settings(self.plugin, self.plan)
        settings.resolve_run([])
        settings.config.pop("optimizer", None)
        settings.config.pop("scheduler", None)
        settings.resolve_model(torch.nn.Module())
        return settings

    # -- preparing -------------------------------------------------------------------------

    def prepare(
        self, objects: Objects, placement: Objects, prepared: Objects, evaluation: bool = False
    ) -> Objects:
        """Return `objects`, with model and optimizer in an engine of DeepSpeed."""
        ConfigError.raise_if(object_problems(objects))
        done = Objects(dataloaders=objects.dataloaders)
        if not objects.models:
            for optimizer, scheduler in itertools.product(prepared.optimizers, objects.schedulers):
                optimizer.attach(scheduler)
            done.schedulers = [
                wrap_scheduler(entry, prepared.optimizers, self.plan)
                for entry in objects.schedulers
            ]
            return done
        (model,), (place,) = objects.models, placement.models
        if self.context_parallel is not None:
            self.context_parallel.follow(model)
        optimizer = next(iter(objects.optimizers), None)
        settings = self._settings(objects, [*prepared.dataloaders, *objects.dataloaders])
        if optimizer is None and settings.stage < 3:
            done.models = [self._evaluated(model, place, evaluation, settings)]
            return done
        self._check_second(optimizer, prepared)
        check_devices(settings)
        if optimizer is not None:
            check_optimizer(settings, model, optimizer)
            check_kind(settings, optimizer)
        if settings.stage == 3:
            self.plugin.set_moe_leaf_modules(model)
        self._build(model, optimizer, objects.schedulers, settings, done)
        for scheduler in prepared.schedulers:
            for wrapped in done.optimizers:
                wrapped.attach(scheduler.scheduler)
            scheduler.follow(done.optimizers)
        return done

    def _settings(self, objects: Objects, loaders: Sequence[object]) -> Settings:
        (model,) = objects.models
        optimizer = next(iter(objects.optimizers), None)
        settings = Settings(self.plugin, self.plan)
        settings.resolve_run(self._batch_sizes(loaders))
        settings.resolve_optimizer(optimizer, self.device.type)
        placeholders = [s for s in objects.schedulers if isinstance(s, DummyScheduler)]
        settings.resolve_scheduler(next(iter(placeholders or objects.schedulers), None), optimizer)
        settings.resolve_model(model)
        return settings

    def _batch_sizes(self, loaders: Sequence[object]) -> list[int]:
        """Return the samples per process and micro-batch of each loader with a batch size."""
        sizes = [size for size in map(_batch_size, loaders) if size]
        divisor = self.plan.parallel_dims.dp_size if self.plan.dataloader.split_batches else 1
        return [max(1, size // divisor) for size in sizes]

    def _evaluated(
        self, model: torch.nn.Module, place: bool, evaluation: bool, settings: Settings
    ) -> torch.nn.Module:
        if not evaluation:
            raise ConfigError.of(
                f"prepare: a model without an optimizer under ZeRO {self.plugin.stage}",
                "only stage 3 shards a model that is not trained",
                "Prepare it with its optimizer in one call; to evaluate it, select a plugin "
                "with zero_stage=3, or call prepare_model(model, evaluation_mode=True).",
            )
        model = model.to(self.device) if place else model
        if self.precision.name in COMPUTE_DTYPES:
            dtype = COMPUTE_DTYPES[self.precision.name]
            initialize.cast_forward(model.to(dtype), dtype, settings.autocast(self.precision))
        return compile_model(model, self.plan.dynamo, self.spec.hooks_inside)

    def _check_second(self, optimizer: torch.optim.Optimizer | None, prepared: Objects) -> None:
        """Refuse a second model for one plugin, and a second one to train."""
        own = [m for m in prepared.models if getattr(m, "accel_plugin", None) is self.plugin]
        if own:
            raise ConfigError(two_models("a second model with one plugin"))
        if optimizer is not None and prepared.optimizers:
            raise ConfigError(two_models("a second model to train with one Accelerator"))

    def _build(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        schedulers: Sequence[object],
        settings: Settings,
        done: Objects,
    ) -> None:
        groups = [list(group["params"]) for group in optimizer.param_groups] if optimizer else []
        engine = initialize.initialize_engine(
            self.package, model, optimizer, schedulers, settings, self.plan
        )
        engine.accel_plugin = self.plugin
        self.plugin.resolve(settings.config)
        if self.precision.name in COMPUTE_DTYPES and not engine.torch_autocast_enabled():
            dtype = COMPUTE_DTYPES[self.precision.name]
            initialize.cast_forward(engine.module, dtype, settings.autocast(self.precision))
        compile_model(engine.module, self.plan.dynamo, self.spec.hooks_inside)
        if settings.stage == 3:
            refuse_copies(engine.modules())
        done.models = [engine]
        if optimizer is None:
            return
        undo_first_step(engine)
        share_weights(engine)
        wrapped = DeepSpeedOptimizerWrapper(engine, groups, optimizer)
        self._trained.set(wrapped)
        if settings.num_steps != (self.plan.accumulation.num_steps or 1):
            GradientState(dataclasses.replace(self.plan.accumulation, num_steps=settings.num_steps))
        done.optimizers = [wrapped]
        for scheduler in schedulers:
            if isinstance(scheduler, DummyScheduler):
                done.schedulers.append(DeepSpeedSchedulerWrapper(engine.lr_scheduler, wrapped))
            else:
                wrapped.attach(scheduler)
                done.schedulers.append(wrap_scheduler(scheduler, [wrapped], self.plan))

    # -- the step --------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: bool) -> None:
        """Let the engine compute gradients, divided by the micro-batches of a step."""
        optimizer = self._trained.require_optimizer("backward")
        ConfigError.raise_if(backward_problems(optimizer, kwargs))
        state, engine = optimizer.gradient_state, optimizer.engine
        ends = state.sync_gradients and not self.sync.num_no_sync
        engine.set_gradient_accumulation_boundary(ends)
        divisor = state.num_steps if kwargs.get(SCALES, True) else 1
        engine.backward(scaled(engine, loss / divisor), **{**kwargs, SCALES: False})
        optimizer.window_ended = ends

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy the engine, and drop DeepSpeed's references to the process group."""
        optimizer = self._trained.optimizer()
        if optimizer is not None:
            optimizer.engine.destroy()
        self._trained.set(None)
        self._active_config = None
        self._leave_group()
        super().close()

    def _leave_group(self) -> None:
        initialize.leave_group(self.package)
        initialize.restore_linear(self.package)


def _batch_size(loader: object) -> int | None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
