"""DeepSpeed: its engine holds model, optimizer and precision, and makes the step.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from accel import env
from accel.config.deepspeed import DeepSpeedPlugin, watch
from accel.errors import ConfigError, Problem
from accel.optimizer import AcceleratedOptimizer
from accel.precision.base import COMPUTE_DTYPES
from accel.prepared import Objects
from accel.scheduler import AcceleratedScheduler, wrap_scheduler
from accel.strategies.base import Strategy
from accel.strategies.compile import compile_model
from accel.strategies.deepcopies import WHOLE_AVERAGE, refuse_copies
from accel.strategies.deepspeed import (
    checks,
    options,
    package,
    shards,
    transformers_flag,
)
from accel.strategies.deepspeed.capabilities import (
    DeepSpeedGradients,
    DeepSpeedSync,
    Trained,
    UniversalCheckpoint,
    ZeroState,
)
from accel.strategies.deepspeed.dummies import DummyScheduler
from accel.strategies.deepspeed.initialize import cast_forward, start
from accel.strategies.deepspeed.partitioned_init import RefusesLostValues
from accel.strategies.deepspeed.settings import MICRO_BATCH, Settings
from accel.strategies.deepspeed.transformers_flag import Recognition
from accel.strategies.deepspeed.wrappers import DeepSpeedOptimizer, DeepSpeedScheduler

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.planning.plan import Plan
    from accel.precision.base import Precision

# What trains or evaluates each engine of this process, as long as both live.
_OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[DeepSpeedStrategy]] = (
    weakref.WeakKeyDictionary()
)


@final
class DeepSpeedStrategy(Strategy):
    """ZeRO: optimizer state, gradients and parameters are sharded, as the plugin's stage says."""

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        ConfigError.raise_if(options.ignored(self.plan))
        for plugin in self.plan.plugin("deepspeed").values():
            plugin.settle()
        self._trained = Trained(plan)
        self.package = package.load(self.device)
        self.sync: DeepSpeedSync = DeepSpeedSync()
        self.gradients = DeepSpeedGradients(self._trained)
        self.state = ZeroState(self._trained, comm, self.package)
        self.native = UniversalCheckpoint(self._trained, comm)
        self.comm.before_exit(self._let_go)
        self._lacks_loaders = False  # whether the engine was built before any loader
        self._recognition: Recognition | None = None
        self._announce(self.plugin)
        watch(self._announce)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The active plugin."""
        return self._trained.plugin

    def _announce(self, changed: DeepSpeedPlugin) -> None:
        """Let transformers build models in shards if the active plugin has them sharded."""
        ours = self.plan.plugin("deepspeed").values()
        if self.comm.closed or not any(changed is plugin for plugin in ours):
            return
        self._withdraw()
        plugin = self.plugin
        wanted = plugin.stage == 3 and plugin.zero3_init_flag is not False
        if wanted and transformers_flag.is_possible():
            package.join_group(self.package, self.plan.local_world_size)
            config = self._init_settings().config
            self._recognition = Recognition(config, self.plan.local_rank)

    def _withdraw(self) -> None:
        if self._recognition is not None:
            self._recognition.withdraw()
            self._recognition = None

    # -- preparing -------------------------------------------------------------------------

    def prepare(
        self,
        objects: Objects,
        placement: Objects,
        prepared: Objects,
        evaluation: bool = False,
    ) -> Objects:
        """Return `objects`, model and optimizer as an engine of DeepSpeed.

        Raises:
            ConfigError: if DeepSpeed cannot take these objects together.
        """
        ConfigError.raise_if(_problems(objects))
        loaders = objects.dataloaders
        done = Objects(dataloaders=loaders)
        if not objects.models:
            self._follow_loaders(loaders)
            for optimizer, scheduler in itertools.product(prepared.optimizers, objects.schedulers):
                optimizer.follow(scheduler)
            done.schedulers = [
                wrap_scheduler(s, prepared.optimizers, self.plan) for s in objects.schedulers
            ]
            return done
        (model,), (place,) = objects.models, placement.models
        optimizer = next(iter(objects.optimizers), None)
        settings = self._settings(objects, [*prepared.dataloaders, *loaders])
        if optimizer is None and settings.stage < 3:
            return self._evaluated(model, place, evaluation, settings, done)
        self._check_second(optimizer, prepared)
        checks.check_devices(settings, self.package)
        if optimizer is not None:
            checks.check_optimizer(settings, model, optimizer)
            checks.check_kind(settings, optimizer)
        checks.check_leaves(settings, model, self.package)
        self._build(model, optimizer, objects.schedulers, settings, done)
        for scheduler in prepared.schedulers:
            self._follow(scheduler, done.optimizers)
        return done

    def _settings(self, objects: Objects, loaders: Sequence[Any]) -> Settings:
        """Return the engine's configuration, completed from the run and its objects."""
        (model,) = objects.models
        optimizer = next(iter(objects.optimizers), None)
        settings = Settings(self.plugin, self.plan)
        settings.follow_run(self._batch_sizes(loaders))
        settings.follow_optimizer(optimizer, self.device.type)
        engine_side = [s for s in objects.schedulers if isinstance(s, DummyScheduler)]
        scheduler = next(iter(engine_side or objects.schedulers), None)
        settings.follow_scheduler(scheduler, optimizer)
        settings.follow_model(model)
        return settings

    def _batch_sizes(self, loaders: Sequence[Any]) -> list[int]:
        """Return the samples per process and micro-batch of each loader that tells them."""
        sizes = [size for size in map(_batch_size, loaders) if size]
        share = self.plan.parallel_dims.dp_size if self.plan.dataloader.split_batches else 1
        return [max(1, size // share) for size in sizes]

    def _follow_loaders(self, loaders: Sequence[Any]) -> None:
        """Let an engine that was built before any loader take the batch size of the first ones."""
        optimizer, sizes = self._trained.optimizer(), self._batch_sizes(loaders)
        if optimizer is None or not self._lacks_loaders or not sizes:
            return
        settings = Settings(optimizer.engine.accel_plugin, self.plan)
        settings.follow_run(sizes)
        ConfigError.raise_if(settings.problems)
        optimizer.engine.set_train_micro_batch_size(settings.config[MICRO_BATCH])
        self._lacks_loaders = False

    def _evaluated(
        self,
        model: torch.nn.Module,
        place: bool,
        evaluation: bool,
        settings: Settings,
        done: Objects,
    ) -> Objects:
        """Put a model that is only evaluated on the device as it is."""
        if not evaluation:
            raise ConfigError(
                Problem(
                    f"prepare: a model without an optimizer under ZeRO {self.plugin.stage}",
                    "only stage 3 shards a model that is not trained",
                    "Prepare it with its optimizer in one call; to evaluate it, select a plugin "
                    "with zero_stage=3, or call prepare_model(model, evaluation_mode=True).",
                )
            )
        model = model.to(self.device) if place else model
        if self.precision.name in COMPUTE_DTYPES:
            dtype = COMPUTE_DTYPES[self.precision.name]
            cast_forward(model.to(dtype), dtype, settings.autocast(self.precision))
        done.models = [self._compile(model)]
        return done

    def _check_second(self, optimizer: torch.optim.Optimizer | None, prepared: Objects) -> None:
        """Refuse a second model for one plugin, and a second one to train."""
        own = [m for m in prepared.models if getattr(m, "accel_plugin", None) is self.plugin]
        users = [owner() for model, owner in _OWNERS.items() if model.accel_plugin is self.plugin]
        elsewhere = self.plugin.stage == 3 and any(user not in (None, self) for user in users)
        problems = []
        if own or elsewhere:
            problems.append(checks.two_models("a second model with one plugin"))
        elif optimizer is not None and prepared.optimizers:
            problems.append(checks.two_models("a second model to train with one Accelerator"))
        ConfigError.raise_if(problems)

    def _build(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        schedulers: Sequence[Any],
        settings: Settings,
        done: Objects,
    ) -> None:
        """Start the engine, and put what it makes of the objects into `done`."""
        groups = [list(group["params"]) for group in optimizer.param_groups] if optimizer else []
        engine = start(self.package, model, optimizer, schedulers, settings, self.plan)
        engine.accel_plugin = self.plugin
        _OWNERS[engine] = weakref.ref(self)
        if self.precision.name in COMPUTE_DTYPES and not engine.torch_autocast_enabled():
            dtype = COMPUTE_DTYPES[self.precision.name]
            cast_forward(engine.module, dtype, settings.autocast(self.precision))
        self._compile(engine.module)
        if settings.stage == 3:
            refuse_copies(engine.modules(), "ZeRO-3", WHOLE_AVERAGE)
        done.models = [engine]
        if optimizer is None:
            return
        shards.undo_first_step(engine)
        shards.share_weights(engine)
        wrapped = DeepSpeedOptimizer(engine, groups, optimizer)
        self._trained.set(wrapped)
        decided = settings.batch_sizes or MICRO_BATCH in self.plugin.decided
        self._lacks_loaders = not decided
        done.optimizers = [wrapped]
        for scheduler in schedulers:
            if isinstance(scheduler, DummyScheduler):
                done.schedulers.append(DeepSpeedScheduler(engine.lr_scheduler, wrapped))
            else:
                wrapped.follow(scheduler)
                done.schedulers.append(wrap_scheduler(scheduler, [wrapped], self.plan))

    def _compile(self, model: torch.nn.Module) -> torch.nn.Module:
        return compile_model(model, self.plan.dynamo, self.spec.hooks_inside)

    def _follow(
        self, scheduler: AcceleratedScheduler, optimizers: Sequence[AcceleratedOptimizer]
    ) -> None:
        """Let a prepared scheduler steer the engine's optimizer, which is prepared after it."""
        for optimizer in optimizers:
            if isinstance(optimizer, DeepSpeedOptimizer):
                optimizer.follow(scheduler.scheduler)
        scheduler.follow(optimizers)

    @contextlib.contextmanager
    def init_context(self) -> Iterator[None]:
        """Context in which a model is sharded while it is built, if the plugin says so.

        Raises:
            ConfigError: inside, where a model initialises a layer that is in parts already.
        """
        if not self.plugin.is_zero3_init_enabled():
            yield
            return
        config = self._init_settings().finish()
        package.join_group(self.package, self.plan.local_world_size)
        with env.patched(LOCAL_RANK=self.plan.local_rank):  # a lone process has no launcher
            # The format follows from the configuration. DeepSpeed takes a `dtype` of its own for
            # bf16 wherever fp16 is not supported, fp32 included.
            context = self.package.zero.Init(config_dict_or_path=config)
        with context, RefusesLostValues():
            yield

    def _init_settings(self) -> Settings:
        """Return what is known of the configuration before there is a model."""
        settings = Settings(self.plugin, self.plan)
        settings.follow_run([])
        settings.config.pop("optimizer", None)
        settings.config.pop("scheduler", None)
        settings.follow_model(torch.nn.Module())
        return settings

    # -- the step --------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Let the engine compute gradients; it divides by the micro-batches of a step.

        Args:
            loss: [] of one micro-batch.
            kwargs: `retain_graph`.

        Raises:
            ConfigError: for another keyword; for what the stage of ZeRO would compute wrongly.
            StateError: if no model is trained yet.
        """
        optimizer = self._trained.require_optimizer("backward")
        ConfigError.raise_if(checks.backward_problems(optimizer, kwargs))
        state, engine = optimizer.gradient_state, optimizer.engine
        ends = state.sync_gradients and not self.sync.holds
        engine.set_gradient_accumulation_boundary(ends)
        engine.backward(loss / state.num_steps, scale_wrt_gas=False, **kwargs)
        optimizer.window_ended = ends

    def close(self) -> None:
        """Let go of the engine, and of what DeepSpeed keeps of the process group."""
        optimizer = self._trained.optimizer()
        if optimizer is not None:
            optimizer.engine.destroy()
        self._trained.forget()
        self._recognition = None
        _OWNERS.clear()  # the process group closes, for every Accelerator
        transformers_flag.withdraw_all()
        self._let_go()
        super().close()

    def _let_go(self) -> None:
        """Drop what DeepSpeed keeps of the process group; engines that are still there hold it."""
        package.leave_group(self.package)
        package.restore_linear(self.package)


def _problems(objects: Objects) -> list[Problem]:
    """Return why DeepSpeed cannot take these objects together."""
    problems = []
    if len(objects.models) > 1:
        problems.append(checks.two_models(f"{len(objects.models)} models in one call"))
    if len(objects.optimizers) > 1:
        problems.append(
            Problem(
                f"prepare: {len(objects.optimizers)} optimizers under DeepSpeed",
                "an engine steps one",
                "Put the parameters into groups of one optimizer.",
            )
        )
    if objects.optimizers and not objects.models:
        problems.append(
            Problem(
                "prepare: an optimizer without its model under DeepSpeed",
                "the engine takes both at once",
                "Prepare them in one call: prepare(model, optimizer, …).",
            )
        )
    return problems


def _batch_size(loader: Any) -> int | None:
    """Return the samples that a prepared loader gives this process at once, if it tells."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
