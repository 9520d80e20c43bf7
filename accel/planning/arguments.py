"""What a caller asks for, before the environment and the machine have their say."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.config.handlers import KwargsHandler
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.enums import DynamoBackend, PrecisionType, RNGType
from accel.strategies.table import plugins


@dataclass
class Arguments:
    """What a caller asks for: the arguments of `Accelerator` that decide how a run is set up.

    Args:
        device_placement: whether prepared objects and batches are moved to the device.
        split_batches: older spelling of `DataLoaderConfiguration.split_batches`; None: not given.
        mixed_precision: no, fp16, bf16 or fp8; None: ACCELERATE_MIXED_PRECISION, else no.
        gradient_accumulation_steps: micro-batches per optimizer step; where it is 1,
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS holds.
        cpu: whether accelerators are ignored.
        device: "cpu", "cuda", "cuda:1", …; None or "auto": the machine's accelerator, else the CPU.
        dataloader_config: how prepared loaders behave.
        plugins: plugins of strategies, by the argument that each one is given in.
        strategy_plugins: plugins of strategies, known by their classes.
        rng_types: generators that ranks synchronise at the start of each epoch; None: "generator".
        project_dir: folder of the run.
        logging_dir: folder of the trackers (older spelling of the field of `ProjectConfiguration`).
        project_config: where states and logs go.
        gradient_accumulation_plugin: accumulation in detail.
        step_scheduler_with_optimizer: whether schedulers step when their optimizer does.
        kwargs_handlers: handlers, at most one of a kind.
        dynamo_backend: backend of `torch.compile`.
        dynamo_plugin: compilation in detail.
        dispatch_batches: older spelling of the field of `DataLoaderConfiguration`.
        even_batches: older spelling of the field of `DataLoaderConfiguration`.
        use_seedable_sampler: older spelling of the field of `DataLoaderConfiguration`.
    """

    device_placement: bool = True
    split_batches: bool | None = None
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    device: str | None = None
    dataloader_config: DataLoaderConfiguration | None = None
    plugins: Mapping[str, Any] = field(default_factory=dict)
    strategy_plugins: Sequence[Any] = ()
    rng_types: Sequence[str | RNGType] | None = None
    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    use_seedable_sampler: bool | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Return the arguments among the local names of a function that takes them.

        Args:
            given: by name; a plugin by the argument that the table of strategies has for it.
        """
        known = {field.name for field in dataclasses.fields(cls)} - {"plugins"}
        names = [name for plugin in plugins() for name in (plugin.argument, *plugin.aliases)]
        return cls(
            plugins={name: given[name] for name in names if given.get(name) is not None},
            **{name: value for name, value in given.items() if name in known},
        )

    @property
    def names_a_strategy(self) -> bool:
        """Whether a plugin is given."""
        return bool(self.strategy_plugins) or any(v is not None for v in self.plugins.values())
