"""Process control: who runs what, in which order, on which part of the data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch

from accel.machine import tree
from accel.machine.device import default_device_type, use_device
from accel.machine.enums import DistributedType
from accel.machine.errors import Problem, ResetError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel.comm.base import Communicator
    from accel.plan.plan import Plan

Function = Callable[..., Any]
T = TypeVar("T")


def _nothing(function: Function) -> Function:
    """Return a stand-in for `function` that does nothing."""

    @functools.wraps(function)
    def skipped(*args: object, **kwargs: object) -> None:
        return None

    return skipped


class ProcessControl:
    """Who this process is, and who runs what: what the states and the `Accelerator` share."""

    plan: Plan
    comm: Communicator
    device: torch.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self.plan.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.comm.world_size

    @property
    def process_index(self) -> int:
        """The index of this process among all."""
        return self.comm.rank

    @property
    def local_process_index(self) -> int:
        """The index of this process on its node."""
        return self.comm.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.comm.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self.comm.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its node."""
        return self.comm.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest index."""
        return self.comm.rank == self.comm.world_size - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.comm.barrier()

    @contextlib.contextmanager
    def _goes_first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:  # a failure of the first must not leave the others waiting
            if is_first:
                self.wait_for_everyone()

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that the main process runs before the others."""
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that each node's main process runs before the others of its node."""
        return self._goes_first(self.is_local_main_process)

    def _only_if(self, here: bool, function: Function | None) -> Function:
        if function is None:
            return functools.partial(self._only_if, here)
        return function if here or not self.use_distributed else _nothing(function)

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs only on the main process; others get None.

        Args:
            function: what to decorate; None returns the decorator (``@state.on_main_process()``).
        """
        return self._only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs only on each node's main process.

        Args:
            function: what to decorate; None returns the decorator.
        """
        return self._only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs only on the last process.

        Args:
            function: what to decorate; None returns the decorator.
        """
        return self._only_if(self.is_last_process, function)

    def on_process(
        self, function: Function | None = None, process_index: int | None = None
    ) -> Function:
        """Decorate a function so that it runs on only one process (on the only one, if so).

        Args:
            function: what to decorate; None returns the decorator.
            process_index: index among all processes.
        """
        return self._only_if(self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """Decorate a function so that it runs on only one process of each node.

        Args:
            function: what to decorate; None returns the decorator.
            local_process_index: index among the processes of a node.
        """
        return self._only_if(self.local_process_index == local_process_index, function)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once per node.

        Args:
            args: what to print.
            kwargs: `sep`, `end`, `file` and `flush`, as for Python's `print`.
        """
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Iterator[T]:
        """Give each process its part of `inputs`, in order; the first ones get the remainder.

        Args:
            inputs: a list, tuple, tensor, array, `datasets.Dataset`, or a dict of such, all of one
                length.
            apply_padding: whether shorter parts are completed with the last element, so that all
                have one length (to gather results; drop the padding afterwards).

        Yields:
            The part, of the same type.

        Raises:
            ConfigError: if the values of a dict differ in length, or `inputs` cannot be split.
        """
        yield tree.split(inputs, self.process_index, self.num_processes, apply_padding)


class SharedState(ProcessControl):
    """What `PartialState` and `AcceleratorState` add: a state that all instances share."""

    _shared_state: ClassVar[dict[str, object]]

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("__dict__", "debug"):
            raise AttributeError(
                f"{type(self).__name__}.{name}={value!r}: the state of a process is immutable. "
                "Give it to the first Accelerator or PartialState of the process."
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        if not self._shared_state and not name.startswith("__"):
            raise ResetError(
                f"{type(self).__name__} was reset, so it has no {name!r} any more. "
                f"Build a new Accelerator() or {type(self).__name__}()."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def initialized(self) -> bool:
        """Whether the shared state is filled."""
        return bool(self._shared_state)

    @property
    def mixed_precision(self) -> str:
        """The number format of a step: no, fp16 or bf16."""
        return self.plan.mixed_precision

    @property
    def debug(self) -> bool:
        """Whether operations check shapes over ranks first; may be set."""
        return self.comm.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.comm.debug = debug

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None for one process."""
        return self.comm.backend

    @property
    def fork_launched(self) -> bool:
        """Whether a launcher forked this process from another one, as in a notebook."""
        return self.plan.environment.flag("FORK_LAUNCHED")

    @property
    def default_device(self) -> torch.device:
        """The device kind that a run without wishes gets on this machine."""
        return torch.device(default_device_type())

    def _cpu_problems(self, cpu: bool) -> list[Problem]:
        if not cpu or self.device.type == "cpu":
            return []
        rule = f"this process was set up with {self.device}, and that cannot change"
        remedy = "Give cpu=True to the first Accelerator or PartialState of the process."
        return [Problem("cpu=True", rule, remedy)]

    def set_device(self) -> None:
        """Make this process's device the current one of its kind."""
        use_device(self.device)

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        """Leave the process group.

        Args:
            group: a group of the caller's own; None: the run's, after all that is under way.
        """
        if group is None:
            self.comm.close()
        else:
            torch.distributed.destroy_process_group(group)

    def __repr__(self) -> str:
        if not self._shared_state:
            return f"{type(self).__name__} (reset)\n"
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )
