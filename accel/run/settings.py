"""What was decided for a run, as the `Accelerator` shows it."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fp8 import AORecipeKwargs, TERecipeKwargs
from accel.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    check_handler,
)
from accel.config.parallelism import ParallelismConfig
from accel.config.training import DataLoaderConfiguration, ProjectConfiguration
from accel.machine.enums import FP8BackendType, RNGType
from accel.machine.errors import Problems
from accel.plan.dims import CP, DP_REPLICATE, DP_SHARD, PP, TP, ParallelDims
from accel.plan.plan import usable_rng_types

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from accel.plan.plan import Plan
    from accel.precision.base import Precision
    from accel.state import AcceleratorState
    from accel.strategies.base import Strategy

Handler = TypeVar("Handler", bound=KwargsHandler)


def _loader_setting(name: str) -> Any:
    """Return the property of a field of `plan.dataloader`, set for loaders prepared later."""

    def read(run: RunSettings) -> object:
        return getattr(run.plan.dataloader, name)

    def write(run: RunSettings, value: object) -> None:
        run._change(dataloader=dataclasses.replace(run.plan.dataloader, **{name: value}))  # type: ignore[arg-type]

    return property(read, write)


def _rank_on(axis: str) -> Any:
    """Return the property of this process's rank on an axis."""
    return property(lambda run: run.parallel_dims.coordinates[axis])


class RunSettings:
    """Read the settings of a run; those of loaders can be set for the loaders prepared later.

    Attributes:
        plan: everything decided, frozen.
        state: who this process is, and what the run was set up with.
        strategy: how the model is distributed.
        precision: the number format.
    """

    plan: Plan
    state: AcceleratorState
    strategy: Strategy
    precision: Precision

    # -- precision -----------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """The number format of a step: no, fp16, bf16 or fp8."""
        return self.plan.mixed_precision

    @property
    def fp8_enabled(self) -> bool:
        """Whether the run computes in fp8."""
        return self.plan.mixed_precision == "fp8"

    @property
    def delayed_fp8_autocast(self) -> bool:
        """Whether the context of fp8 is entered later than the forward pass; it never is."""
        return False

    @property
    def native_amp(self) -> bool:
        """Whether models compute under torch's autocast; False switches it off."""
        return self.plan.mixed_precision != "no" and self.plan.autocast.enabled

    @native_amp.setter
    def native_amp(self, native_amp: bool) -> None:
        self._cast(dataclasses.replace(self.plan.autocast, enabled=native_amp))

    def _cast(self, handler: AutocastKwargs) -> None:
        self._change(autocast=handler)
        self.precision.handler = handler

    def _change(self, **settings: Any) -> None:
        """Take over other settings, for objects that are prepared later."""
        self.plan = self.strategy.plan = dataclasses.replace(self.plan, **settings)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; NO where the run computes in another format."""
        return self.plan.fp8.backend

    @property
    def fp8_recipe_handler(self) -> KwargsHandler | None:
        """The recipe of fp8 training; None where the run computes in another format."""
        return self.plan.fp8.recipe

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The recipe of TransformerEngine; None where it does not compute."""
        recipe = self.plan.fp8.recipe
        return recipe if isinstance(recipe, TERecipeKwargs) else None

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The recipe of torchao; None where it does not compute."""
        recipe = self.plan.fp8.recipe
        return recipe if isinstance(recipe, AORecipeKwargs) else None

    # -- handlers: None where none was given -----------------------------------------------------

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """How the forward pass is cast; what is set holds from the next pass on."""
        return self._given(self.plan.autocast)

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._cast(self._replaced(AutocastKwargs, handler))

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """How models are replicated; what is set holds for models that are prepared later."""
        return self._given(self.plan.ddp)

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self._change(ddp=self._replaced(DistributedDataParallelKwargs, handler))

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """What `profile` records; what is set holds for its next call."""
        return self._given(self.plan.profile)

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._change(profile=self._replaced(ProfileKwargs, handler))

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """How the gradient scaler of fp16 was created."""
        return self._given(self.plan.scaler)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """How the process group was created."""
        return self._given(self.plan.init)

    def _given(self, handler: Handler) -> Handler | None:
        return handler if isinstance(handler, tuple(self.plan.given_handlers)) else None

    def _replaced(self, kind: type[Handler], handler: Handler | None) -> Handler:
        """Note whether a handler of this kind is given; return it, or the default one."""
        check_handler(handler, kind, "a handler of the run")
        others = self.plan.given_handlers - {kind}
        self._change(given_handlers=others if handler is None else others | {kind})
        return kind() if handler is None else handler

    # -- parallelism ---------------------------------------------------------------------------

    @property
    def parallel_dims(self) -> ParallelDims:
        """Sizes of the parallel axes, this process's rank on them, and what follows from them."""
        return self.plan.parallel_dims

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the parallel axes that the run was asked for; None: it was not."""
        return self.plan.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The `DeviceMesh` of the run; None where its strategy has none, as DDP."""
        return self.strategy.device_mesh

    tensor_parallel_rank: int = _rank_on(TP)
    """The rank of this process among those that compute parts of the same matrices."""

    pipeline_parallel_rank: int = _rank_on(PP)
    """The pipeline stage that this process computes."""

    context_parallel_rank: int = _rank_on(CP)
    """The rank of this process among those that compute parts of the same sequences."""

    data_parallel_rank: int = _rank_on(DP_REPLICATE)
    """The index of the replica of the model that this process is a part of."""

    data_parallel_shard_rank: int = _rank_on(DP_SHARD)
    """The rank of this process among those that shard one replica of the model."""

    @property
    def multi_device(self) -> bool:
        """Whether the run has several processes, each on a device of its own."""
        return self.plan.world_size > 1

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards the model; it is the only version there is."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether FSDP2 is on, which other axes of a `ParallelismConfig` compose with."""
        return self.state.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process holds a part of the model that a checkpoint takes from it.

        True on the ranks of the first replica: of a model that is not sharded, on rank 0 alone.
        """
        at = self.parallel_dims.coordinates
        return at[DP_REPLICATE] == 0

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return the context in which sequences are sharded over the context-parallel ranks.

        `buffers` are divided in place, and whole again afterwards. Forward and backward passes run
        inside; attention is computed across the ranks, other layers on parts of sequences. Give
        `labels` as those of the next token (`shift_labels`), divided alike. A model without
        `position_ids` that counts positions itself needs them in a buffer. Without
        context-parallel ranks, nothing changes.

        Args:
            buffers: tensors with a sequence dim, of equal lengths.
            buffer_seq_dims: the sequence dim of each.
            no_restore_buffers: those of `buffers` that need not be restored afterwards.

        Raises:
            ConfigError: if sequences cannot be divided evenly.
            StateError: if no attention was computed across the ranks.
        """
        return self.strategy.context(buffers or (), buffer_seq_dims or (), no_restore_buffers or ())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: object) -> Any:
        """Return a loader of this rank's parts of sequences, for `sp_size` or `cp_size` above 1.

        Its batches are divided as by `maybe_context_parallel`, until the next one is asked for.

        Args:
            dl: a prepared loader, of batches [B, S, ...].
            model: the prepared model.
        """
        ranks = self.strategy.context_parallel
        return dl if ranks is None else ranks.loader(dl)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's active plugin, which the next `prepare` follows; None where it is off."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """DeepSpeed's configuration of the active plugin; None where it is off."""
        plugin = self.state.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """DeepSpeed's engine that trains, whose `backward` makes the step, too; None before."""
        return self.strategy.wrapped_engine

    # -- loaders -------------------------------------------------------------------------------

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders that are prepared from now on behave."""
        return self.plan.dataloader

    @dataloader_config.setter
    def dataloader_config(self, dataloader_config: DataLoaderConfiguration) -> None:
        self._change(dataloader=dataloader_config)

    split_batches: bool = _loader_setting("split_batches")
    """Whether loaders split their batches over processes."""

    dispatch_batches: bool | None = _loader_setting("dispatch_batches")
    """Whether the main process reads for all; None: for streams alone."""

    even_batches: bool = _loader_setting("even_batches")
    """Whether last batches are completed, so that each process has as many."""

    use_seedable_sampler: bool = _loader_setting("use_seedable_sampler")
    """Whether random samplers draw an order that depends on seed and epoch alone."""

    non_blocking: bool = _loader_setting("non_blocking")
    """Whether copies to the device overlap with computation."""

    use_stateful_dataloader: bool = _loader_setting("use_stateful_dataloader")
    """Whether loaders are torchdata's `StatefulDataLoader`."""

    # -- the rest ------------------------------------------------------------------------------

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers that are prepared from now on step when their optimizer does."""
        return self.plan.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, step_scheduler_with_optimizer: bool) -> None:
        self._change(step_scheduler_with_optimizer=step_scheduler_with_optimizer)

    @property
    def rng_types(self) -> tuple[str, ...]:
        """The generators that processes synchronise, for loaders that are prepared from now on."""
        return self.plan.rng_types

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[str | RNGType] | None) -> None:
        found = Problems()
        names = usable_rng_types(rng_types, self.plan.device_type, found)
        found.raise_if()
        self._change(rng_types=names)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where states and logs go."""
        return self.plan.project

    @project_configuration.setter
    def project_configuration(self, project_configuration: ProjectConfiguration) -> None:
        self._change(project=project_configuration)

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
