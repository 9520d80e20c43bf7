"""The environment variables of the process: the only module that reads or writes them.

Free of torch. `Environment.read()` takes one snapshot of what a launcher and a person may set;
`plan.resolve` works only on that snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, overload

from accel.machine import launcher_variables
from accel.machine.errors import ConfigError, Problem

FunctionOrClass = TypeVar("FunctionOrClass", bound=Callable[..., object])

LAUNCHER = "ACCELERATE_LAUNCHER_PID"  # set by `accel launch` for its processes
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "y", "on", "t"), True),
    **dict.fromkeys(("0", "false", "no", "n", "off", "f"), False),
}


def parse_bool(text: object) -> bool | None:
    """Return what a text such as "yes", "off" or "1" means; None if it is no such word."""
    return _BOOLEANS.get(str(text).strip().lower())


def prefixed(*prefixes: str) -> dict[str, str]:
    """Return the variables whose names begin with one of `prefixes` and that are not blank."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(prefixes) and text.strip()
    }


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
    found = launcher_variables.integer(os.environ, name)
    return default if found is None else found


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return what a text such as "yes", "off" or "1" means, as 1 or 0.

    Args:
        value: the text, in any case.
        to_bool: whether to return True or False instead.

    Raises:
        ConfigError: for another text.
    """
    found = parse_bool(value)
    if found is None:
        raise ConfigError.of(f"{value!r}", "expected true or false", "Write true or false.")
    return found if to_bool else int(found)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable says yes.

    Args:
        key: its name.
        default: returned where it is unset or empty.

    Raises:
        ConfigError: if it says neither yes nor no.
    """
    found = optional_flag(key)
    return default if found is None else found


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable.

    Args:
        key: its name.
        default: returned where it is not set.
    """
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of several variables that is a number of at least 0.

    Args:
        env_keys: their names.
        default: returned where there is none.

    Raises:
        ConfigError: if one before that is no integer.
    """
    numbers = (integer(key) for key in env_keys)
    return next((number for number in numbers if number is not None and number >= 0), default)


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


@contextlib.contextmanager
def _restored(prefix: str = "") -> Iterator[None]:
    """Restore the variables with a prefix when the context ends."""
    before = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    try:
        yield
    finally:
        added = [name for name in os.environ if name.startswith(prefix) and name not in before]
        set_values({**before, **dict.fromkeys(added)})


def patch_environment(**kwargs: object) -> contextlib.AbstractContextManager[None]:
    """Set variables inside the context; afterwards they are as before.

    Args:
        kwargs: values by name; names are upper-cased, values become text.
    """
    return patched(**{name.upper(): str(value) for name, value in kwargs.items()})


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all variables inside the context; afterwards they are as before."""
    with _restored():
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: FunctionOrClass) -> FunctionOrClass:
    """Restore the variables ``ACCELERATE_*`` after each call of a function or test method.

    Args:
        func_or_cls: a function (``async`` too), or a class, of which the methods ``test*`` are
            decorated, those of derived classes included.
    """
    if inspect.isclass(func_or_cls):
        _purge_derived_classes(func_or_cls)
        _purge_tests(func_or_cls)
        return func_or_cls

    @functools.wraps(func_or_cls)
    def purged(*args: Any, **kwargs: Any) -> object:
        with _restored("ACCELERATE_"):
            return func_or_cls(*args, **kwargs)

    return cast(FunctionOrClass, purged)


def _purge_tests(cls: type) -> None:
    for name, method in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(method, (staticmethod, classmethod)):
            setattr(cls, name, type(method)(purge_accelerate_environment(method.__func__)))
        elif inspect.isfunction(method):
            setattr(cls, name, purge_accelerate_environment(method))


def _purge_derived_classes(cls: Any) -> None:
    own = vars(cls).get("__init_subclass__")

    def init_subclass(derived: Any, **kwargs: Any) -> None:
        if own is None:
            super(cls, derived).__init_subclass__(**kwargs)
        else:
            own.__func__(derived, **kwargs)
        _purge_tests(derived)

    cls.__init_subclass__ = classmethod(cast(Any, init_subclass))


def copy() -> dict[str, str]:
    """Return all variables."""
    return dict(os.environ)


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
        run_id: the launcher's name of the job.
        own_devices: number of GPUs that only this process sees; None: it sees those of its node.
        unusable: why the processes of a launcher could not join each other; None: they can, or
            there is no launcher.
        agent_store: whether the elastic agent hosts the store at master_addr:master_port.
        mixed_precision: default of `Accelerator(mixed_precision=…)`.
        accumulation_steps: default of `Accelerator(gradient_accumulation_steps=…)`.
        use_cpu: whether accelerators are ignored.
        torch_device: default of `Accelerator(device=…)`.
        debug: whether operations check shapes over ranks first.
        launcher: process id of `accel launch`, if it is the parent of this process.
        cpu_affinity: whether each process runs on the CPUs of one NUMA node (`accel.machine.numa`).
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
    own_devices: int | None = None
    unusable: Problem | None = None
    mixed_precision: str | None = None
    accumulation_steps: int | None = None
    use_cpu: bool = False
    torch_device: str | None = None
    debug: bool = False
    launcher: int | None = None
    cpu_affinity: bool = False
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
        return dataclasses.replace(
            _placed(),
            mixed_precision=read("ACCELERATE_MIXED_PRECISION") or None,
            accumulation_steps=integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            use_cpu=flag("ACCELERATE_USE_CPU"),
            torch_device=read("ACCELERATE_TORCH_DEVICE") or None,
            debug=flag("ACCELERATE_DEBUG_MODE"),
            cpu_affinity=flag("ACCELERATE_CPU_AFFINITY"),
            launcher=os.getppid() if read(LAUNCHER) == str(os.getppid()) else None,
            variables=copy(),
        )


def _placed() -> Environment:
    """Return where this process stands among others: torchrun's variables, else a launcher's."""
    found = None if (read("WORLD_SIZE") or "").strip() else launcher_variables.read(os.environ)
    address, port = read("MASTER_ADDR"), integer("MASTER_PORT")
    if found is not None:
        address, port = address or found.master_addr, port or found.master_port
        problem = found.problem(address, port)
        if problem is not None:
            return Environment(unusable=problem)
        return Environment(
            rank=found.rank,
            local_rank=found.local_rank,
            world_size=found.world_size,
            local_world_size=found.local_world_size,
            master_addr=address,
            master_port=port,
            run_id=found.job,
            own_devices=found.devices,
        )
    return Environment(
        rank=integer("RANK"),
        local_rank=integer("LOCAL_RANK"),
        world_size=integer("WORLD_SIZE", 1),
        local_world_size=integer("LOCAL_WORLD_SIZE"),
        master_addr=address,
        master_port=port,
        restart_count=integer("TORCHELASTIC_RESTART_COUNT", 0),
        run_id=read("TORCHELASTIC_RUN_ID") or "",
        agent_store=flag("TORCHELASTIC_USE_AGENT_STORE"),
    )
