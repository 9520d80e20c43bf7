"""FSDP2: parameters, gradients and optimizer state in shards, gathered one unit at a time.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import torch
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn import Parameter

from accel.config.checks import import_callable
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.errors import ConfigError, Problem
from accel.logging import get_logger
from accel.prepared import Objects
from accel.rng import synchronize_rng_states
from accel.strategies.compile import is_on
from accel.strategies.mesh.base import DTensorStrategy
from accel.strategies.mesh.device_mesh import TENSOR, check_given, data_axes
from accel.strategies.mesh.ignored_modules import average_gradients, ignored_modules, parameters_of
from accel.strategies.mesh.materialize import InitialWeights
from accel.strategies.mesh.mixed_precision import Formats, build_formats, cast_buffers
from accel.strategies.mesh.tp_plan import split_matrices
from accel.strategies.mesh.units import Modules, check_classes, find_units
from accel.strategies.mesh.units_by_dtype import split_by_dtype

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.planning.plan import Plan
    from accel.precision.base import Precision

logger = get_logger(__name__)


@final
class FSDPStrategy(DTensorStrategy):
    """Each process holds a part of every parameter; with tensor parallelism, of every part."""

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        plugin = self.plan.plugin("fsdp")
        self.plugin = FullyShardedDataParallelPlugin() if plugin is None else plugin
        self._split = self.plan.plugin("tensor_parallel")
        self._formats: Formats = build_formats(
            self.plugin.mixed_precision_policy, self.plan.mixed_precision
        )
        given = None if self._split is None else self._split.torch_device_mesh
        if given is not None and self._mesh is not None:
            check_given(given, self._mesh)
        # The parameters of ignored modules, by model.
        self._ignored: WeakKeyDictionary[torch.nn.Module, list[Parameter]] = WeakKeyDictionary()

    # -- preparing -------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[None]:
        """Return the context in which a model gets weights on rank 0 only, if the plugin says so.

        The other ranks build it on the meta device. After it, torch's generator is everywhere where
        rank 0 left it, as if all had drawn.
        """
        return self._on_first_rank() if self.plugin.cpu_ram_efficient_loading else nullcontext()

    @contextmanager
    def _on_first_rank(self) -> Iterator[None]:
        with nullcontext() if self.comm.rank == 0 else torch.device("meta"):
            yield
        synchronize_rng_states(["torch"])

    def prepare(
        self, objects: Objects, placement: Objects, prepared: Objects, evaluation: bool = False
    ) -> Objects:
        """Return the objects of one call wrapped for training.

        Raises:
            ConfigError: for a model of another way of training, or blocks that none has.
        """
        check_classes(objects.models, self.plugin.transformer_cls_names_to_wrap)
        for model in objects.models:
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):
                raise ConfigError(
                    Problem(
                        "prepare: a DistributedDataParallel model with fsdp",
                        "they cannot be combined",
                        "Prepare the module inside.",
                    )
                )
        return super().prepare(objects, placement, prepared, evaluation)

    def parallelize(self, model: torch.nn.Module) -> None:
        """Shard `model` unit by unit, after its matrices are split where that is on, too."""
        weights = self._initial_weights()
        weights.check(model)
        ignored = ignored_modules(model, self.plugin.ignored_modules)
        units = find_units(model, self.plugin, set(parameters_of(ignored)))
        self._checkpoint_activations(units)
        if self._split is not None and self._split.tp_size > 1:
            self._split_first(model, weights)
        # The policy decides on outputs, in a hook around the forward pass.
        self.precision.wrap_forward(model, outputs_in_fp32=False)
        self._shard(model, units, weights, ignored)
        if ignored:
            for module in ignored:  # also where parameters rest in the host's memory
                module.to(self.device)
            self._ignored[model] = parameters_of(ignored)
        if self.plugin.forward_prefetch:
            _prefetch_forward(units)

    def compile(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` compiled as the run says; of a whole one, the graphs between hooks."""
        dynamo = self.plan.dynamo
        inside = any(m is not model and isinstance(m, FSDPModule) for m in model.modules())
        if inside and is_on(dynamo) and dynamo.use_regional_compilation is False:
            logger.warning_once(
                "use_regional_compilation=False under FSDP: gathering breaks the graph at each "
                "unit. Units are compiled; what calls them in a loop is not. For one graph, shard "
                "the model as one unit: auto_wrap_policy='no_wrap'."
            )
        return super().compile(model)

    def _initial_weights(self) -> InitialWeights:
        import_callable(self.plugin, "param_init_fn")
        offloads = isinstance(self._offload, CPUOffloadPolicy)
        device = torch.device("cpu") if offloads else self.device
        sync = self.plugin.sync_module_states is not False
        return InitialWeights(self.comm, device, self.plugin.param_init_fn, sync)

    def _split_first(self, model: torch.nn.Module, weights: InitialWeights) -> None:
        assert self._mesh is not None
        assert self._split is not None
        weights.settle(model)
        split_matrices(model.to(self.device), self._mesh[TENSOR], self._split.tp_plan)

    def _shard(
        self,
        model: torch.nn.Module,
        units: Modules,
        weights: InitialWeights,
        ignored: Modules,
    ) -> None:
        assert self._mesh is not None
        options: dict[str, Any] = {"mesh": data_axes(self._mesh), "offload_policy": self._offload}
        reshard = self.plugin.reshard_after_forward
        for unit in [*split_by_dtype(model, units, set(parameters_of(ignored))), model]:
            weights.settle(unit)
            whole = set(parameters_of(ignored))
            cast_buffers(unit, self._formats.buffers)
            policy = self._formats.root if unit is model else self._formats.units
            fully_shard(
                unit,
                # Not torch's None: it is made out in the first forward, maybe within `no_sync`.
                reshard_after_forward=unit is not model if reshard is None else reshard,
                mp_policy=policy,
                ignored_params=whole or None,
                **options,
            )

    @property
    def _offload(self) -> OffloadPolicy:
        given = self.plugin.cpu_offload
        if isinstance(given, OffloadPolicy):
            return given
        if not getattr(given, "offload_params", given):
            return OffloadPolicy()
        # There is nothing to pin where the host computes.
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu")

    def _checkpoint_activations(self, units: Modules) -> None:
        if not self.plugin.activation_checkpointing:
            return
        if not units:
            raise ConfigError(
                Problem(
                    "activation_checkpointing=True with a model of one unit",
                    "what is recomputed is one unit at a time",
                    "Name the classes of blocks in transformer_cls_names_to_wrap.",
                )
            )
        for unit in units:
            checkpoint(unit)

    # -- the step --------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients; average those of ignored modules where a model's are exchanged.

        Args:
            loss: [], already scaled for accumulation and precision.
            kwargs: for `torch.Tensor.backward`.
        """
        loss.backward(**kwargs)
        for model, parameters in self._ignored.items():
            if self._mesh is not None and self.sync.reduces(model):
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                average_gradients(trained, self._mesh)


def _prefetch_forward(units: Modules) -> None:
    """Let each unit gather the next while it computes; `units` come inner and last ones first."""
    forward = [unit for unit in reversed(units) if isinstance(unit, FSDPModule)]
    for unit, following in itertools.pairwise(forward):
        unit.set_modules_to_forward_prefetch([following])
