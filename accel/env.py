"""The environment variables of the process: the only module that reads or writes them.

Free of torch. `Environment.read()` takes one snapshot of what a launcher and a person may set;
`plan.resolve` works only on that snapshot.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import overload

from accel.errors import ConfigError

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "y", "on", "t"), True),
    **dict.fromkeys(("0", "false", "no", "n", "off", "f"), False),
}


def parse_bool(text: object) -> bool | None:
    """Return what a text such as "yes", "off" or "1" means; None if it is no such word."""
    return _BOOLEANS.get(str(text).strip().lower())


def read(name: str, default: str | None = None) -> str | None:
    """Return the variable `name`, or `default` where it is not set."""
    return os.environ.get(name, default)


def flag(name: str, variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variable `name` says yes; unset and empty say no, else `ConfigError`."""
    text = variables.get(name, "")
    value = parse_bool(text) if text.strip() else False
    if value is None:
        raise ConfigError.of(
            f"{name}={text!r} (environment)",
            "expected true or false",
            f"Set {name}=1 or {name}=0.",
        )
    return value


def optional_flag(name: str) -> bool | None:
    """Return whether the variable `name` says yes; None where it is unset or empty."""
    return flag(name) if os.environ.get(name, "").strip() else None


@overload
def integer(name: str, default: int) -> int: ...
@overload
def integer(name: str, default: None = None) -> int | None: ...
def integer(name: str, default: int | None = None) -> int | None:
    """Return the variable `name` as a number, or `default` where it is unset or empty.

    Raise `ConfigError` if it is no integer.
    """
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError.of(
            f"{name}={value!r} (environment)",
            "expected an integer",
            f"Correct or unset {name}.",
        ) from None


def set_values(values: Mapping[str, object]) -> None:
    """Set the variables in `values` (as text); those that are None are removed."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


@contextlib.contextmanager
def patched(**values: object) -> Iterator[None]:
    """Set variables (None removes one) inside the context; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in values}
    set_values(values)
    try:
        yield
    finally:
        set_values(before)


def copy() -> dict[str, str]:
    """Return all variables."""
    return dict(os.environ)


# Variables in which other launchers than torchrun give the world size; srun may come with PMI.
SIZES = (
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_SIZE",
)


def launched() -> tuple[str, int] | None:
    """Return the variable that shows several launched processes, and their number at least.

    None where there is none, or where WORLD_SIZE is set. SLURM_NTASKS counts the tasks of
    a job, of which a script without srun is none.

    Source: https://slurm.schedmd.com/srun.html (SLURM_STEP_NUM_TASKS);
        https://docs.open-mpi.org (OMPI_COMM_WORLD_SIZE)
    """
    if (read("WORLD_SIZE") or "").strip():
        return None
    sizes = [(name, integer(name, 1)) for name in SIZES]
    sizes.append(("PMIX_RANK", integer("PMIX_RANK", 0) + 1))
    return next(((name, size) for name, size in sizes if size > 1), None)


@dataclass(frozen=True)
class Environment:
    """The environment variables of a run.

    Args:
        rank: index of this process among all; None where no launcher set it.
        local_rank: index on its node; None where no launcher set it.
        world_size: number of processes.
        local_world_size: number of processes on this node; None: not given.
        master_addr: host of the rendezvous.
        master_port: TCP port there.
        restart_count: attempts of the elastic agent before this one.
        run_id: the elastic agent's name of the job.
        launched: a variable of a launcher that has not set WORLD_SIZE, and the number of processes
            that it has started at least; None: there is no such launcher.
        agent_store: whether the elastic agent hosts the store at master_addr:master_port.
        mixed_precision: default of `Accelerator(mixed_precision=…)`.
        accumulation_steps: default of `Accelerator(gradient_accumulation_steps=…)`.
        use_cpu: whether accelerators are ignored.
        debug: whether operations check shapes over ranks first.
        dynamo_backend: default of `Accelerator(dynamo_backend=…)`.
        dynamo_mode: default of `TorchDynamoPlugin(mode=…)`; likewise the next three.
        dynamo_fullgraph: whether a graph break is an error.
        dynamo_dynamic: whether shapes are symbolic.
        dynamo_regional: whether repeated blocks are compiled instead of the full model.
        variables: all variables, of which strategies read those of their plugins; they may hold
            secrets, so a pickle has none of them.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int = 1
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    run_id: str = ""
    agent_store: bool = False
    launched: tuple[str, int] | None = None
    mixed_precision: str | None = None
    accumulation_steps: int | None = None
    use_cpu: bool = False
    debug: bool = False
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_fullgraph: bool | None = None
    dynamo_dynamic: bool | None = None
    dynamo_regional: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "variables": {}}

    @property
    def has_rendezvous(self) -> bool:
        """Whether a launcher gave this process its rank and the address of the rendezvous."""
        return None not in (self.rank, self.master_addr, self.master_port)

    def flag(self, name: str) -> bool:
        """Return whether the variable `name` says yes; unset and empty say no."""
        return flag(name, self.variables)

    @classmethod
    def read(cls) -> Environment:
        """Return a snapshot, or raise `ConfigError` for a number or switch that is none."""
        return cls(
            rank=integer("RANK"),
            local_rank=integer("LOCAL_RANK"),
            world_size=integer("WORLD_SIZE", 1),
            local_world_size=integer("LOCAL_WORLD_SIZE"),
            master_addr=read("MASTER_ADDR"),
            master_port=integer("MASTER_PORT"),
            restart_count=integer("TORCHELASTIC_RESTART_COUNT", 0),
            run_id=read("TORCHELASTIC_RUN_ID") or "",
            agent_store=flag("TORCHELASTIC_USE_AGENT_STORE"),
            launched=launched(),
            mixed_precision=read("ACCELERATE_MIXED_PRECISION") or None,
            accumulation_steps=integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            use_cpu=flag("ACCELERATE_USE_CPU"),
            debug=flag("ACCELERATE_DEBUG_MODE"),
            dynamo_backend=read("ACCELERATE_DYNAMO_BACKEND") or None,
            dynamo_mode=read("ACCELERATE_DYNAMO_MODE") or None,
            dynamo_fullgraph=optional_flag("ACCELERATE_DYNAMO_USE_FULLGRAPH"),
            dynamo_dynamic=optional_flag("ACCELERATE_DYNAMO_USE_DYNAMIC"),
            dynamo_regional=optional_flag("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
            variables=copy(),
        )
