"""The shared state of a process: who it is, what it was set up with, and where accumulation stands.

All instances of a class share one state, which the first one fills.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, ClassVar, NoReturn

from accel.comm.connect import connect
from accel.comm.processes import SharedState
from accel.config.deepspeed import DeepSpeedPlugin, active, named
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.handlers import InitProcessGroupKwargs
from accel.config.megatron import MegatronLMPlugin
from accel.config.parallelism import ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import GradientAccumulationPlugin, TorchDynamoPlugin
from accel.machine.device import default_device_type, use_device
from accel.machine.enums import DistributedType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, Problems, ResetError
from accel.plan.arguments import Arguments
from accel.plan.plan import Plan, resolve

# What of the environment is settled once a process has joined the others.
WORLD = (
    *("rank", "local_rank", "world_size", "local_world_size"),
    *("master_addr", "master_port", "restart_count", "run_id", "agent_store"),
    *("own_devices", "unusable"),
)


def _init_handler(kwargs: dict[str, Any]) -> list[InitProcessGroupKwargs]:
    """Return the keyword arguments of `PartialState` as a handler."""
    return [InitProcessGroupKwargs(**kwargs)] if kwargs else []


def current_environment() -> Environment:
    """Return the environment, with what this process has settled in place of what it says now."""
    environment = Environment.read()
    if not PartialState._shared_state or PartialState().comm.closed:
        return environment
    partial = PartialState()
    settled = {name: getattr(partial.plan.environment, name) for name in WORLD}
    if partial.device.type == "cpu" != default_device_type():
        settled["use_cpu"] = True
    if AcceleratorState._shared_state:
        settled["mixed_precision"] = AcceleratorState().mixed_precision
    return dataclasses.replace(environment, **settled)


def settled_arguments(arguments: Arguments) -> Arguments:
    """Return `arguments`, with what this process has settled where they say nothing of it.

    Several models are trained by several `Accelerator`s that share their plugins, and the number of
    micro-batches.
    """
    if not AcceleratorState._shared_state or PartialState().comm.closed:
        return arguments
    if GradientState._shared_state:
        kept = GradientState()._settings()
        arguments = dataclasses.replace(arguments, accumulation=kept)
    plan = AcceleratorState().plan
    if arguments.names_a_strategy:
        return arguments
    shared = [plugin for plugin in plan.spec.plugins if plugin.shared]
    return dataclasses.replace(
        arguments, plugins={plugin.argument: plan.plugin(plugin.name) for plugin in shared}
    )


def _adopt(plan: Plan, settled: Plan) -> Plan:
    """Return `plan` with the device and the process group of `settled`."""
    names = ("device_type", "device", "backend", "init")
    return dataclasses.replace(plan, **{name: getattr(settled, name) for name in names})


class PartialState(SharedState):
    """Who this process is and where it computes; filled by the first instance.

    Args:
        cpu: whether accelerators are ignored.
        kwargs: fields of `InitProcessGroupKwargs`.

    Attributes:
        device: where this process computes.
    """

    _shared_state: ClassVar[dict[str, object]] = {}

    def __init__(self, cpu: bool = False, *, _plan: Plan | None = None, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        handlers = _init_handler(kwargs)  # unknown names are refused also where the rest is settled
        if self._shared_state:
            ConfigError.raise_if(self._cpu_problems(cpu))
            return
        if _plan is None:
            arguments = Arguments(cpu=cpu, kwargs_handlers=handlers)
            _plan = resolve(arguments, Environment.read())
        use_device(_plan.device)
        if _plan.environment.launcher is not None:
            from accel.machine import parent_watch

            parent_watch.die_with(_plan.environment.launcher)
        if _plan.environment.cpu_affinity:
            from accel.machine.numa import set_numa_affinity

            set_numa_affinity(_plan.local_rank)
        comm = connect(_plan)
        self._shared_state.update(plan=_plan, comm=comm, device=_plan.device)

    @property
    def mixed_precision(self) -> str:
        """The number format of a step: that of the `AcceleratorState`, where there is one."""
        state = AcceleratorState._shared_state
        return AcceleratorState().mixed_precision if state else super().mixed_precision

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the shared state; a process group stays, and the next instance takes it over."""
        cls._shared_state.clear()


class AcceleratorState(SharedState):
    """What a run was set up with; filled by the first instance.

    Args:
        mixed_precision: no, fp16, bf16 or fp8; None: ACCELERATE_MIXED_PRECISION, else no.
        cpu: whether accelerators are ignored.
        dynamo_plugin: compilation.
        deepspeed_plugin: DeepSpeed, in one plugin or several by name.
        fsdp_plugin: fully sharded training.
        megatron_lm_plugin: training by megatron-core.
        _from_accelerator: whether an `Accelerator` builds it.
        torch_tp_plugin: tensor parallelism.
        parallelism_config: sizes of the parallel axes.
        kwargs: fields of `InitProcessGroupKwargs`.

    Attributes:
        device: where this process computes.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: object = None,
        fsdp_plugin: object = None,
        megatron_lm_plugin: object = None,
        _from_accelerator: bool = False,
        *,
        torch_tp_plugin: object = None,
        parallelism_config: ParallelismConfig | None = None,
        _plan: Plan | None = None,
        **kwargs: Any,
    ) -> None:
        handlers = _init_handler(kwargs)  # unknown names are refused where the rest is settled, too
        self.__dict__ = self._shared_state
        if _from_accelerator and PartialState._shared_state and PartialState().comm.closed:
            AcceleratorState._reset_state(reset_partial_state=True)  # a run that has ended
        if self._shared_state:
            self._check(mixed_precision if _plan is None else _plan.mixed_precision, cpu)
            self._shared_state["_from_accelerator"] |= _from_accelerator
            return
        if _plan is None:
            arguments = Arguments(
                mixed_precision=mixed_precision,
                cpu=cpu,
                dynamo_plugin=dynamo_plugin,
                plugins={
                    "deepspeed_plugin": deepspeed_plugin,
                    "fsdp_plugin": fsdp_plugin,
                    "megatron_lm_plugin": megatron_lm_plugin,
                    "torch_tp_plugin": torch_tp_plugin,
                },
                parallelism_config=parallelism_config,
                kwargs_handlers=handlers,
            )
            _plan = resolve(arguments, current_environment())
        partial = PartialState(cpu, _plan=_plan)
        if _plan.backend is not None and partial.backend is None:  # an engine wants a group of one
            partial._shared_state.update(plan=_plan, comm=connect(_plan))
        self._shared_state.update(
            plan=_adopt(_plan, partial.plan),
            comm=partial.comm,
            device=partial.device,
            _from_accelerator=_from_accelerator,
        )

    @property
    def initialized(self) -> bool:
        """Whether an `Accelerator` has filled the shared state."""
        return bool(self._shared_state.get("_from_accelerator"))

    def settle(self, plan: Plan) -> Plan:
        """Return `plan` with the device and the process group of this process.

        Args:
            plan: what an `Accelerator` resolved; a later one may differ in all other points.
        """
        return _adopt(plan, self.plan)

    def _check(self, mixed_precision: str | None, cpu: bool) -> None:
        problems = Problems()
        if mixed_precision is not None and str(mixed_precision) != self.mixed_precision:
            problems.add(
                f"mixed_precision={str(mixed_precision)!r}",
                f"this process was set up with {self.mixed_precision!r}",
                "Give it to the first Accelerator, or restart the process.",
            )
        problems += self._cpu_problems(cpu)
        problems.raise_if()

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """DeepSpeed's plugins by name; None where it is off."""
        plugins = self.plan.plugin("deepspeed")
        return None if plugins is None else dict(plugins)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's active plugin, which the next `prepare` follows; None where it is off."""
        return active(self.deepspeed_plugins)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return the plugin called `name`.

        Args:
            name: key of the dictionary that the `Accelerator` was given.

        Raises:
            ConfigError: if there is none.
        """
        return named(self.deepspeed_plugins, name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make the plugin called `name` the active one, which the next `prepare` follows.

        Args:
            name: key of the dictionary that the `Accelerator` was given.

        Raises:
            ConfigError: if there is none.
        """
        self.get_deepspeed_plugin(name).select()

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How FSDP2 shards the model; None where it is off."""
        found: FullyShardedDataParallelPlugin | None = self.plan.plugin("fsdp")
        return found

    @property
    def megatron_lm_plugin(self) -> MegatronLMPlugin | None:
        """The plugin of Megatron-LM; None where it is off."""
        found: MegatronLMPlugin | None = self.plan.plugin("megatron")
        return found

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards the model; it is the only version there is."""
        return self.fsdp_plugin is not None

    @property
    def torch_tp_plugin(self) -> TorchTensorParallelPlugin | None:
        """How weights are sharded over tensor-parallel ranks; None where they are not."""
        found: TorchTensorParallelPlugin | None = self.plan.plugin("tensor_parallel")
        return found

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the parallel axes that the run was asked for; None: it was not."""
        return self.plan.parallelism

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """How models are compiled."""
        return self.plan.dynamo

    def __repr__(self) -> str:
        if not self._shared_state:
            return super().__repr__()
        return f"{super().__repr__()}\nMixed precision: {self.mixed_precision}\n"

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forget the shared state, and that of `PartialState` if it is to be reset, too."""
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()


def is_initialized() -> bool:
    """Return whether an `Accelerator` has filled the `AcceleratorState` of this process.

    Unlike ``AcceleratorState().initialized``, the question builds none.

    Example:
        >>> plugin = AcceleratorState().deepspeed_plugin if is_initialized() else None
    """
    return bool(AcceleratorState._shared_state.get("_from_accelerator"))


class GradientState:
    """Where gradient accumulation stands; filled by the first instance.

    Read at every step, so everything that a step asks for is a plain attribute.

    Args:
        gradient_accumulation_plugin: takes the place of the earlier settings; None keeps them.

    Attributes:
        sync_gradients: whether the current micro-batch ends an optimizer step.
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: whether calls of a scheduler's `step` within a window count for torch's
            check of the call order.
        sync_with_dataloader: whether the end of a loader closes the current window.
        sync_each_batch: whether gradients are exchanged at every micro-batch.
        is_xla_gradients_synced: whether the script has reduced gradients of a TPU; False, as XLA's
            compiler does.
        end_of_dataloader: whether the active loader gave its last batch.
        remainder: samples that the last batch really has, over all processes, 0 if all of them;
            -1: not known, or not at the last batch.
        abandoned_remainder: (`remainder`, samples with repetitions) of the last batch, if a pass
            was abandoned on it, as in ``batch = next(iter(loader))``; (0, 0) from the next pass on.
    """

    _shared_state: ClassVar[dict[str, object]] = {}

    sync_gradients: bool
    num_steps: int
    adjust_scheduler: bool
    sync_with_dataloader: bool
    sync_each_batch: bool
    is_xla_gradients_synced: bool
    end_of_dataloader: bool
    remainder: int
    abandoned_remainder: tuple[int, int]
    _loaders: list[weakref.ref[Any]]
    _num_passes: int  # that began, over any loader

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self.is_xla_gradients_synced = False
            self.abandoned_remainder = 0, 0
            self._loaders = []
            self._num_passes = 0
            self._follow_dataloader()
            self._configure(GradientAccumulationPlugin())
        if gradient_accumulation_plugin is not None:
            self._start_over()
            self._configure(gradient_accumulation_plugin)

    def _configure(self, plugin: GradientAccumulationPlugin) -> None:
        self.num_steps = plugin.num_steps or 1
        self.adjust_scheduler = plugin.adjust_scheduler
        self.sync_with_dataloader = plugin.sync_with_dataloader
        self.sync_each_batch = plugin.sync_each_batch

    def __getattr__(self, name: str) -> NoReturn:
        if not self._shared_state and not name.startswith("__"):
            raise ResetError(
                f"GradientState was reset, so it has no {name!r}. Build a new Accelerator()."
            )
        raise AttributeError(f"'GradientState' object has no attribute {name!r}")

    @property
    def initialized(self) -> bool:
        """Whether the shared state is filled."""
        return bool(self._shared_state)

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together; builds a `PartialState` if there is none."""
        kind = AcceleratorState if AcceleratorState._shared_state else PartialState
        return kind().distributed_type

    @property
    def plugin_kwargs(self) -> dict[str, object]:
        """The settings that differ from the defaults of `GradientAccumulationPlugin`."""
        return self._settings().to_kwargs()

    def _settings(self) -> GradientAccumulationPlugin:
        return GradientAccumulationPlugin(
            num_steps=self.num_steps,
            adjust_scheduler=self.adjust_scheduler,
            sync_with_dataloader=self.sync_with_dataloader,
            sync_each_batch=self.sync_each_batch,
        )

    @property
    def active_dataloader(self) -> Any | None:
        """The innermost loader that is being iterated over, or None."""
        loaders = self._loaders
        return loaders[-1]() if loaders else None

    @property
    def dataloader_references(self) -> list[Any | None]:
        """None, then all loaders that are being iterated over, the outermost first."""
        return [None, *(reference() for reference in self._loaders)]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated over."""
        return self.active_dataloader is not None

    def __reduce__(self) -> tuple[type[GradientState], tuple[()]]:
        """Copies and unpickled ones share the state of their process."""
        return type(self), ()

    def _start_over(self) -> None:
        """Close the window of accumulation that an earlier training left open."""
        self.sync_gradients = True
        self.abandoned_remainder = 0, 0

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _follow_dataloader(self) -> None:
        """Take over where the active loader stands; loaders call this when that changes."""
        loader = self.active_dataloader
        self.end_of_dataloader = False if loader is None else loader.end_of_dataloader
        self.remainder = -1 if loader is None else loader.remainder

    def _add_dataloader(self, dataloader: object) -> list[tuple[Any, int]]:
        """Make `dataloader` the active one; return the others, with the batches that they gave."""
        read = (reference() for reference in self._loaders)
        others = [(one, one.batches_given) for one in read if one not in (None, dataloader)]
        self.abandoned_remainder = 0, 0
        self._loaders.append(weakref.ref(dataloader, self._forget))
        self._num_passes += 1
        self._follow_dataloader()
        return others

    def _remove_dataloader(self, dataloader: object) -> None:
        """Take out the innermost entry of `dataloader`; the one around it becomes active."""
        loaders = self._loaders
        for position in range(len(loaders) - 1, -1, -1):
            if loaders[position]() is dataloader:
                del loaders[position]
                break
        self._follow_dataloader()

    def _forget(self, reference: weakref.ref[object]) -> None:
        if self.initialized:
            self._loaders[:] = [other for other in self._loaders if other is not reference]
            self._follow_dataloader()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state.clear()
