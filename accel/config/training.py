"""Plugins for loaders, accumulation, compilation and the project folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel.config.checks import as_enum, check_choice, check_minimum, check_types
from accel.config.handlers import KwargsHandler
from accel.machine import env
from accel.machine.enums import DynamoBackend
from accel.machine.errors import Problem, Problems


def _text(variable: str) -> str | None:
    return env.read(variable) or None


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders divide batches over processes.

    Args:
        split_batches: whether each batch of the original loader is split over the processes (the
            observed global batch is then the loader's own), or each process gets full batches.
        dispatch_batches: whether the main process reads and sends the slices; None: only for
            iterable data sets.
        even_batches: whether the last batches are completed from the beginning so that each process
            has as many.
        use_seedable_sampler: whether the order of random samplers is a function of seed, the
            loader's place among those prepared, and epoch. A pass that is left early does not
            count the epoch on: call ``loader.set_epoch(epoch)``.
        data_seed: that seed; None takes the initial seed of the sampler's generator, or of torch's.
        non_blocking: whether copies to the device overlap with computation (wants pinned memory).
        use_stateful_dataloader: whether loaders are torchdata's `StatefulDataLoader`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        check_types(self, problems)
        problems.raise_if()


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients of several micro-batches make one optimizer step.

    Args:
        num_steps: micro-batches per optimizer step. None: the caller of the engine decides.
        adjust_scheduler: whether calls of a scheduler's `step` within a window, which leave the
            learning rate as it is, count for torch's check that it is called after the optimizer's.
        sync_with_dataloader: whether the end of a loader closes the current window.
        sync_each_batch: whether every micro-batch exchanges gradients (less memory, more traffic).
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        check_types(self, problems)
        check_minimum(self, "num_steps", 1, problems)
        problems.raise_if()


@dataclass
class ProjectConfiguration:
    """Where a run's states and logs go.

    Args:
        project_dir: folder of the run.
        logging_dir: folder of the trackers; None: `project_dir`.
        automatic_checkpoint_naming: whether states go to ``checkpoints/checkpoint_<iteration>``.
        total_limit: how many of those are kept; None: all.
        iteration: number of the next one.
        save_on_each_node: whether each node's main process writes, for disks that are not shared.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)
        problems = Problems()
        check_types(self, problems)
        check_minimum(self, "total_limit", 1, problems)
        check_minimum(self, "iteration", 0, problems)
        problems.raise_if()

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set `project_dir`, and `logging_dir` where it is None.

        Args:
            project_dir: folder of the run.
        """
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


# Environment variables of `TorchDynamoPlugin` by field, with their readers.
VARIABLES: dict[str, tuple[str, Callable[[str], str | bool | None]]] = {
    "backend": ("ACCELERATE_DYNAMO_BACKEND", _text),
    "mode": ("ACCELERATE_DYNAMO_MODE", _text),
    "fullgraph": ("ACCELERATE_DYNAMO_USE_FULLGRAPH", env.optional_flag),
    "dynamic": ("ACCELERATE_DYNAMO_USE_DYNAMIC", env.optional_flag),
    "use_regional_compilation": (
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        env.optional_flag,
    ),
}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled with `torch.compile`.

    An argument that is None takes the environment variable ``ACCELERATE_DYNAMO_…`` (BACKEND, MODE,
    USE_FULLGRAPH, USE_DYNAMIC, USE_REGIONAL_COMPILATION), if that is set.

    Args:
        backend: a value of `DynamoBackend`; None: "no", which does not compile.
        mode: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs, of inductor.
        fullgraph: whether a graph break is an error; None: it is not.
        dynamic: whether shapes are symbolic; None lets torch decide.
        options: options of the backend, by name; not together with `mode`.
        disable: whether `torch.compile` does nothing (for tests).
        use_regional_compilation: whether repeated blocks are compiled instead of the full model,
            which takes less time; None: where the engine works between the layers (FSDP).

    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """

    backend: Any = None
    mode: Any = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        for name, (variable, read) in VARIABLES.items():
            if getattr(self, name) is None:
                setattr(self, name, read(variable))
        self.fullgraph = bool(self.fullgraph) if self.fullgraph is None else self.fullgraph
        self.backend = DynamoBackend.NO if self.backend is None else str(self.backend).lower()
        as_enum(self, "backend", DynamoBackend)
        problems = Problems()
        check_types(self, problems)
        modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        check_choice(self, "mode", modes, problems)
        if self.options is not None and not isinstance(self.options, Mapping):
            problems.add(
                f"TorchDynamoPlugin.options={self.options!r}",
                "they are the backend's options by name",
                "Give options={'name': value}.",
            )
        if self.backend != DynamoBackend.NO:
            problems += self._contradictions()
        problems.raise_if()

    def _contradictions(self) -> list[Problem]:
        special = self.mode not in (None, "default")
        if special and self.options is not None:
            rule, remedy = "a mode is a set of options", "Give one of the two."
            return [Problem(f"TorchDynamoPlugin.mode={self.mode!r} with options", rule, remedy)]
        if special and self.backend != DynamoBackend.INDUCTOR:
            value = f"TorchDynamoPlugin.mode={self.mode!r} with backend={str(self.backend)!r}"
            remedy = "Leave mode out, or give backend='inductor'."
            return [Problem(value, "only inductor has modes", remedy)]
        return []


def is_compiling(plugin: TorchDynamoPlugin) -> bool:
    """Return whether `plugin` asks for anything to be compiled."""
    return bool(plugin.backend != DynamoBackend.NO)
