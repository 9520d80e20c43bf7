"""Kwargs handlers: how objects of torch are created.

Fields whose type OmegaConf cannot express (a callable, a duration, one of a few words) are
annotated `Any` and checked when the object is made, so these classes can be nodes of a YAML schema.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any

from accel.config.checks import as_enum, check_choice, check_minimum, check_types, import_callable
from accel.machine.enums import DDPCommunicationHookType
from accel.machine.errors import ConfigError, Problem, Problems, nearest
from accel.machine.imports import load_attribute

if TYPE_CHECKING:
    import torch


class KwargsHandler:
    """Mixin: `to_kwargs` gives the fields that differ from their defaults."""

    def to_dict(self, ignore_keys: Collection[str] = ()) -> dict[str, Any]:
        """Return the fields by name.

        Args:
            ignore_keys: those to skip.
        """
        names = [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if name not in ignore_keys}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults of the documented class, or are new."""
        kinds = [kind for kind in type(self).__mro__ if dataclasses.is_dataclass(kind)]
        documented: Any = next((k for k in kinds if k.__module__.startswith("accel.")), kinds[0])
        default = documented().to_dict()
        return {n: v for n, v in self.to_dict().items() if n not in default or v != default[n]}


def check_handler(handler: object, kind: type[KwargsHandler], method: str) -> None:
    """Raise `ConfigError` unless `handler`, given to `method`, is None or of a kind."""
    if handler is not None and not isinstance(handler, kind):
        remedy = f"Give {kind.__name__}(…), or None."
        raise ConfigError.of(f"{method}({handler!r})", f"it takes {kind.__name__}", remedy)


@dataclass
class AutocastKwargs(KwargsHandler):
    """How `torch.autocast` behaves.

    Args:
        enabled: whether autocast is on, also over weights that FSDP2 or DeepSpeed casts.
        cache_enabled: whether casts of weights are cached within a context; None: torch's default.

    Source: https://docs.pytorch.org/docs/stable/amp.html#torch.autocast
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        check_types(self, problems)
        problems.raise_if()


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How a model is wrapped in `torch.nn.parallel.DistributedDataParallel`.

    Args:
        dim: the batch dimension.
        broadcast_buffers: whether rank 0's buffers are broadcast at each forward pass.
        bucket_cap_mb: size of a gradient bucket, MiB.
        find_unused_parameters: whether parameters without a gradient are looked for in each step.
        check_reduction: accepted for compatibility; torch ignores it.
        gradient_as_bucket_view: whether gradients are views into the buckets (saves one copy).
        static_graph: whether the graph is the same in every step.
        comm_hook: the communication hook.
        comm_wrapper: the hook wrapped around it: no, fp16 or bf16.
        comm_state_option: arguments of the PowerSGD state: ``{"matrix_approximation_rank": 2}``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = DDPCommunicationHookType.NO
    comm_wrapper: Any = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        as_enum(self, "comm_hook", DDPCommunicationHookType)
        as_enum(self, "comm_wrapper", DDPCommunicationHookType)
        problems = Problems()
        check_types(self, problems)
        check_choice(self, "comm_wrapper", ("no", "fp16", "bf16"), problems)
        check_minimum(self, "bucket_cap_mb", 1, problems)
        problems.raise_if()

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Give a wrapped model the communication hook; `prepare` does it for its own.

        Args:
            model: has none yet.
        """
        load_attribute("accel.strategies.ddp:register_hook")(model, self)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the gradient scaler of fp16 training behaves.

    Args:
        init_scale: first scale factor.
        growth_factor: factor after `growth_interval` steps without overflow.
        backoff_factor: factor after a step with overflow.
        growth_interval: number of optimizer steps.
        enabled: whether losses are scaled at all.

    Source: https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        problems = Problems()
        check_types(self, problems)
        check_minimum(self, "growth_interval", 1, problems)
        bounds = {"init_scale": (0, inf), "growth_factor": (1, inf), "backoff_factor": (0, 1)}
        for name in () if problems else bounds:
            (low, high), value = bounds[name], getattr(self, name)
            if not low < value < high:
                rule = f"it is above {low}" + (f" and below {high}" if high < inf else "")
                remedy = f"Give {name}={getattr(type(self), name)}, say."
                problems.add(f"GradScalerKwargs.{name}={value!r}", rule, remedy)
        problems.raise_if()


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is initialised.

    Args:
        backend: name of the backend. The default, nccl, stands for the device's own backend
            (gloo on CPU).
        init_method: URL of the rendezvous; None reads the environment.
        timeout: how long a collective may wait: a `timedelta`, or seconds. None: torch's default.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool):
            self.timeout = timedelta(seconds=self.timeout)
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise ConfigError.of(
                f"InitProcessGroupKwargs.timeout={self.timeout!r}",
                "it is a timedelta or a number of seconds",
                "Give timeout=600 for ten minutes.",
            )


ACTIVITIES = ("cpu", "xpu", "mtia", "cuda")
SCHEDULE_KEYS = ("wait", "warmup", "active", "repeat", "skip_first")


@dataclass
class ProfileKwargs(KwargsHandler):
    """How the profiler records.

    Args:
        activities: recorded devices: cpu, xpu, mtia, cuda; None records all there is.
        schedule_option: steps to wait, warmup, active, repeat, skip_first, as in `torch.profiler`;
            None records everything.
        on_trace_ready: called with the profiler when a trace is complete: a callable or the dotted
            name of one.
        record_shapes: whether shapes of inputs are kept.
        profile_memory: whether allocations are tracked.
        with_stack: whether file and line of each operator are kept.
        with_flops: whether operations are estimated by formula.
        with_modules: whether the module hierarchy is kept.
        output_trace_dir: folder for one Chrome trace per rank; None writes none.

    Raises:
        ConfigError: for an activity or a key of the schedule that there is not.

    Source: https://docs.pytorch.org/docs/stable/profiler.html
    """

    activities: list[str] | None = None
    schedule_option: Any = None
    on_trace_ready: Any = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        import_callable(self, "on_trace_ready")
        schedule = dict(self.schedule_option or {})
        problems = Problems(
            Problem(
                f"ProfileKwargs.activities={activity!r}",
                f"each is one of {', '.join(ACTIVITIES)}",
                nearest(activity, ACTIVITIES),
            )
            for activity in self.activities or ()
            if activity not in ACTIVITIES
        )
        problems += [
            Problem(
                f"ProfileKwargs.schedule_option[{key!r}]",
                f"each key is one of {', '.join(SCHEDULE_KEYS)}",
                nearest(key, SCHEDULE_KEYS),
            )
            for key in schedule
            if key not in SCHEDULE_KEYS
        ]
        check_types(self, problems)
        if schedule and schedule.get("active", 0) < 1:
            problems.add(
                f"ProfileKwargs.schedule_option={schedule!r}",
                "a cycle records at least one step",
                "Give active=1 or more.",
            )
        problems.raise_if()

    def build(
        self, on_trace_ready: Callable[[torch.profiler.profile], None] | None = None
    ) -> torch.profiler.profile:
        """Build a profiler with this configuration.

        torch skips activities of a device that this machine has not, with a warning.

        Args:
            on_trace_ready: takes the place of the field of that name where that is None.

        Returns:
            A `torch.profiler.profile`, not started.
        """
        import torch

        # A schedule of torch waits, warms up and so on for 0 steps unless given otherwise.
        steps = {"wait": 0, "warmup": 0, "active": 0, **(self.schedule_option or {})}
        schedule = torch.profiler.schedule(**steps) if self.schedule_option else None
        kinds = torch.profiler.ProfilerActivity
        return torch.profiler.profile(
            activities=[getattr(kinds, name.upper()) for name in self.activities or ()] or None,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready or on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
