"""Importing DeepSpeed, joining its process group, compiling its ops, and building engines.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from accel.config.deepspeed_json import Config
from accel.machine import env, tree
from accel.machine.errors import ConfigError
from accel.machine.imports import is_available, require
from accel.plan.plan import Plan
from accel.precision.wrapping import MakeContext, register_wrapper, wrap_forward
from accel.strategies.deepspeed.settings import BATCH
from accel.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from accel.strategies.deepspeed.settings import Settings


# The process group that DeepSpeed's cached groups belong to.
_GROUPS: list[weakref.ref[dist.ProcessGroup]] = []
_SET: set[str] = set()  # variables that no launcher had set


def import_deepspeed(device: torch.device) -> ModuleType:
    """Return the package `deepspeed`, computing on devices of the type of `device`.

    Raises:
        ConfigError: if this process already uses it on another type of device.
        MissingPackageError: if it is not installed.
    """
    with env.patched(DS_ACCELERATOR=device.type):  # chosen once, at import
        package = require("deepspeed", "deepspeed_plugin")
        kind = package.accelerator.get_accelerator().device_name()
    if kind.partition(":")[0] != device.type:
        raise ConfigError.of(
            f"device={device} with deepspeed_plugin",
            f"DeepSpeed computes on {kind} in this process, and that cannot change",
            "Start a new process.",
        )
    # Every process compiles its shared-memory collectives at first use; one that is killed
    # meanwhile leaves a lock that all later ones wait for. gloo does as well.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    register_wrapper(package.DeepSpeedEngine)
    # Its engines switch off autocast that is on around them, with a warning; the autocast around
    # the model inside of them stays on.
    nested: Any = importlib.import_module(f"{package.__name__}.runtime.torch_autocast")
    nested._WARNED_NESTED_AUTOCAST = True
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
        category=FutureWarning,
    )
    return package


def restore_linear(package: ModuleType) -> None:
    """Restore torch's own `linear`, which ZeRO-3 replaces for good by one of less memory."""
    stage_3 = importlib.import_module(f"{package.__name__}.runtime.zero.partition_parameters")
    if torch.nn.functional.linear is stage_3.zero3_linear_wrap:
        torch.nn.functional.linear = stage_3.InsertPostInitMethodToModuleSubClasses.linear_bk


# -- process group -------------------------------------------------------------------------


def join_group(package: ModuleType, plan: Plan) -> None:
    """Let DeepSpeed use the process group of the run.

    It keeps groups in globals; those of an earlier run's process group are dropped.
    """
    world: Any = dist.group.WORLD
    if _GROUPS and _GROUPS[0]() is world and package.comm.comm.cdb is not None:
        return
    leave_group(package)
    # As its own launcher sets them. On CPUs it would count devices, by starting a program, at every
    # reduction of ZeRO-3; and ZeRO-3 reads the rank at each step, without asking what it is.
    variables = {"LOCAL_SIZE": plan.local_world_size, "LOCAL_RANK": plan.local_rank}
    missing = {name: value for name, value in variables.items() if env.read(name) is None}
    env.set_values(missing)
    _SET.update(missing)
    package.comm.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    _GROUPS[:] = [weakref.ref(world)]


def leave_group(package: ModuleType) -> None:
    """Drop DeepSpeed's references to a process group."""
    package.utils.groups._release_process_group_references(None)
    package.comm.comm.cdb = None
    _GROUPS.clear()
    env.set_values(dict.fromkeys(_SET))
    _SET.clear()
    # Some of its methods default to the group at the time of import; None is the current one.
    transport = importlib.import_module(f"{package.__name__}.comm.torch").TorchBackend
    for method in map(inspect.unwrap, vars(transport).values()):
        defaults = getattr(method, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            method.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )


# -- engines -------------------------------------------------------------------------------


def initialize_engine(
    package: ModuleType,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedulers: Sequence[object],
    settings: Settings,
    plan: Plan,
) -> DeepSpeedEngine:
    """Return the engine of a model. Called on every rank.

    Args:
        model: the user's own.
        optimizer: the user's own, or its placeholder; None: the model is only evaluated.
        schedulers: of which a `DummyScheduler` may build the engine's own.
        settings: complete; contradictions raise `ConfigError`.
    """
    config = dict(settings.finish())
    # The engine counts ranks that compute parts of the same samples, too.
    config[BATCH] *= plan.parallel_dims.cp
    arguments: dict[str, object] = {"model": model, "config": config}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        arguments["optimizer"] = optimizer
    dummy = next((s for s in schedulers if isinstance(s, DummyScheduler)), None)
    if dummy is not None and dummy.lr_scheduler_callable is not None:
        arguments["lr_scheduler"] = dummy.lr_scheduler_callable
    join_group(package, plan)
    if settings.on_disk:
        build_op(package, "AsyncIOBuilder")
    with _swap_in_own_dtype(package):
        engine, *_ = package.initialize(**arguments)
    return engine


@contextlib.contextmanager
def _swap_in_own_dtype(package: ModuleType) -> Iterator[None]:
    """Context in which DeepSpeed swaps parameters to disk in the dtype of its configuration.

    Where fp16 is not supported, `zero.Init` takes any `dtype` for bf16 (its conditional expression
    binds so): fp32 parameters would be swapped through buffers of bf16.
    """
    device = package.accelerator.get_accelerator()
    if device.is_fp16_supported():
        yield
        return
    device.is_fp16_supported = lambda: True  # fp16 itself is refused earlier
    try:
        yield
    finally:
        del device.is_fp16_supported


def cast_forward(module: torch.nn.Module, dtype: torch.dtype, make_context: MakeContext) -> None:
    """Cast floating inputs of `module`, whose weights are `dtype`, to it, and its outputs to fp32.

    `make_context` returns a fresh context for each forward pass: autocast to `dtype`, in which
    losses, norms and softmax are computed in fp32.
    """

    def cast(_: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inputs = tree.recursively_apply(
            lambda tensor: tensor.to(dtype),
            (args, kwargs),
            test_type=lambda leaf: isinstance(leaf, torch.Tensor) and leaf.is_floating_point(),
        )
        return inputs[0], inputs[1]

    module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
    wrap_forward(module, make_context)


# -- partitioned models --------------------------------------------------------------------


@contextlib.contextmanager
def partitioned_init(package: ModuleType, settings: Settings, plan: Plan) -> Iterator[None]:
    """Context in which each layer of a model is partitioned as soon as it is built.

    Raises `ConfigError` inside, where a model initializes a layer that is partitioned already.

    Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#constructing-massive-models
    """
    config = dict(settings.finish())
    join_group(package, plan)
    # What a model imports may bring it, and inside, where `torch.tensor` is DeepSpeed's, it fails.
    importlib.import_module("torch._dynamo")
    # The dtype follows from the configuration: see `_swap_in_own_dtype`.
    with package.zero.Init(config_dict_or_path=config), ForbidLostValues():
        yield


@final
class ForbidLostValues(TorchFunctionMode):
    """Raise `ConfigError` where a parameter that is partitioned already is written in place.

    DeepSpeed partitions the parameters of each layer at the end of its ``__init__``. The tensors
    are empty from then on, so the values would be lost without an error.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, unless it writes to a partitioned parameter."""
        target: Any = args[0] if args else (kwargs or {}).get("tensor")  # `torch.nn.init` names it
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if (writes or name == "__setitem__") and _is_partitioned(target):
            raise ConfigError.of(
                f"{name} on a parameter of shape {tuple(target.ds_shape)} under ZeRO-3",
                "its layer is partitioned already, so that the values would be lost",
                "Initialize inside of `with deepspeed.zero.GatheredParameters(parameter, "
                "modifier_rank=0):`, or remove zero3_init_flag.",
            )
        return func(*args, **(kwargs or {}))


def _is_partitioned(tensor: Any) -> bool:
    is_parameter = isinstance(tensor, torch.Tensor) and hasattr(tensor, "ds_numel")
    return is_parameter and tensor.numel() < tensor.ds_numel


# -- compiled ops --------------------------------------------------------------------------


def build_op(package: ModuleType, builder: str) -> None:
    """Load an op of DeepSpeed, which compiles it at first (minutes)."""
    # A virtual environment that is not activated has ninja beside its Python.
    programs = env.read("PATH", os.defpath), str(Path(sys.executable).parent)
    with env.patched(PATH=os.pathsep.join(map(str, programs))):
        package.accelerator.get_accelerator().create_op_builder(builder).load(verbose=False)


@final
class ActiveConfig:
    """Answer transformers for the plugin that is active at the time of the question.

    Args:
        is_enabled: a bound method: whether models are partitioned while they are built.
        make_config: a bound method: DeepSpeed's configuration, complete enough for
            `deepspeed.zero.Init`, which transformers calls next.
        local_rank: of this process.
    """

    def __init__(
        self, is_enabled: Callable[[], bool], make_config: Callable[[], Config], local_rank: int
    ) -> None:
        # Weak: the strategy owns this object, which ends with it.
        self._is_enabled = weakref.WeakMethod(is_enabled)
        self._make_config = weakref.WeakMethod(make_config)
        self._local_rank = local_rank

    def is_zero3(self) -> bool:
        """Return whether models are partitioned while they are built."""
        is_enabled = self._is_enabled()
        return is_enabled is not None and is_enabled()

    @property
    def config(self) -> Config | None:
        """DeepSpeed's configuration; None: there is no strategy any more."""
        make_config = self._make_config()
        if make_config is None:
            return None
        if env.read("LOCAL_RANK") is None:  # a single process has no launcher
            env.set_values({"LOCAL_RANK": self._local_rank})
            weakref.finalize(self, env.set_values, {"LOCAL_RANK": None})
        return make_config()


def register(config: ActiveConfig, has_stage_3: bool) -> None:
    """Let transformers ask `config` from now on.

    Without stage 3, transformers, which takes seconds to import, asks only where it is imported.
    """
    if "transformers" in sys.modules or (has_stage_3 and is_available("transformers")):
        module = require("transformers.integrations.deepspeed", "deepspeed_plugin")
        module.set_hf_deepspeed_config(config)
