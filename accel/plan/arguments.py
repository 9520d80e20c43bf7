"""What a caller asks for, before the environment and the machine have their say."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.config.checks import check_types
from accel.config.handlers import KwargsHandler
from accel.config.parallelism import ParallelismConfig
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.machine.enums import DynamoBackend, PrecisionType, RNGType
from accel.machine.errors import Problems
from accel.strategies.spec import Plugins
from accel.strategies.table import plugins


class _NotGiven(int):
    """A default that reads and counts as its number, and differs from the number given."""


ONE_BY_DEFAULT = _NotGiven(1)
_INSTANCES: dict[str, type] = {
    "dataloader_config": DataLoaderConfiguration,
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": TorchDynamoPlugin,
    "parallelism_config": ParallelismConfig,
}


@dataclass
class Arguments:
    """The arguments of `Accelerator` that decide how a run is set up.

    `plugins` are those of strategies, by the argument that each one is given in. `accumulation` is
    what an earlier `Accelerator` of the process set, which one that says nothing of it keeps.
    """

    device_placement: bool = True
    split_batches: bool | None = None
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int = ONE_BY_DEFAULT
    cpu: bool = False
    device: str | None = None
    dataloader_config: DataLoaderConfiguration | None = None
    plugins: Plugins = field(default_factory=dict)
    strategy_plugins: Sequence[object] = ()
    rng_types: Sequence[str | RNGType] | None = None
    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    kwarg_handler: Sequence[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    use_seedable_sampler: bool | None = None
    parallelism_config: ParallelismConfig | None = None
    accumulation: GradientAccumulationPlugin | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Return keyword arguments of `Accelerator` without those that decide nothing here."""
        known = {field.name for field in dataclasses.fields(cls)} - {"plugins", "accumulation"}
        names = [name for plugin in plugins() for name in (plugin.argument, *plugin.aliases)]
        return cls(
            plugins={name: given[name] for name in names if given.get(name) is not None},
            **{name: value for name, value in given.items() if name in known},
        )

    @property
    def names_a_strategy(self) -> bool:
        """Whether a plugin is given."""
        return bool(self.strategy_plugins) or any(v is not None for v in self.plugins.values())

    def checked(self, problems: Problems) -> Arguments:
        """Return the arguments without those of a wrong type, each of which adds a problem."""
        arguments = dataclasses.replace(self)
        count = len(problems)
        check_types(arguments, problems, where="", skip=("gradient_accumulation_steps",))
        wrong = {problem.value.partition("=")[0] for problem in problems[count:]}
        for name, kind in _INSTANCES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                remedy = f"Give {name}={kind.__name__}(…)."
                problems.add(f"{name}={value!r}", f"it is a {kind.__name__}", remedy)
                wrong.add(name)
        for name in ("project_dir", "logging_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                problems.add(f"{name}={value!r}", "it is the path of a folder", "Give a text.")
                wrong.add(name)
        handlers: list[KwargsHandler] = []
        for name in ("kwargs_handlers", "kwarg_handler"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Iterable):
                rule, remedy = "it is a list of handlers", f"Give {name}=[…]."
                problems.add(f"{name}={value!r}", rule, remedy)
            else:
                handlers += value or ()
        defaults = Arguments()
        valid = {name: getattr(defaults, name) for name in wrong}
        return dataclasses.replace(arguments, kwargs_handlers=handlers, kwarg_handler=None, **valid)
