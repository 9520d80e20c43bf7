"""A function on several processes, from a notebook or for debugging: forks under torchelastic.

Source: https://huggingface.co/docs/accelerate/package_reference/launchers;
    https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.machine import env, parent_watch
from accel.machine.device import default_device_type, device_count
from accel.machine.enums import DistributedType, PrecisionType
from accel.machine.errors import ConfigError, Problems, StateError, unknown_choice
from accel.machine.launcher_variables import OWN_STORE
from accel.state import AcceleratorState, PartialState, is_initialized

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
DEFAULT_PORT = 29500
ANY_ADDRESS = ("127.0.0.1", "localhost")
# Variables that a launch sets for its own workers, or leaves behind.
OF_WORKERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = str(DEFAULT_PORT),
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, object] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Train with a function on several processes, forks of this one; one process is this one.

    The `Accelerator` is built inside the function, and nothing has touched a GPU before. Forks
    compute with one thread each on the CPU, as OpenMP's others do not survive a fork.

    Args:
        function: called with `args` on each process.
        args: its arguments; forks need not pickle them.
        num_processes: on this node; None: one per GPU, or one on the CPU.
        mixed_precision: default of the function's `Accelerator`: no, fp16, bf16 or fp8.
        use_port: TCP port of the rendezvous; 0: a free one (of one node).
        master_addr: host of node 0.
        node_rank: index of this node.
        num_nodes: number of nodes, each of which calls this.
        rdzv_backend: of torchelastic: static, c10d, ….
        rdzv_endpoint: ``host:port`` of its store; "": `master_addr` and `use_port`.
        rdzv_conf: further settings of it.
        rdzv_id: name of the job.
        max_restarts: how often a failed worker group starts anew.
        monitor_interval: seconds between two looks at the workers.
        log_line_prefix_template: prefix of each line that workers print; None: none.

    Raises:
        ConfigError: if the arguments contradict each other or this machine.
        StateError: if this process has an Accelerator or a process group, or has touched a GPU; of
            one process, if its Accelerator computes in another precision than `mixed_precision`.
        RuntimeError: if a worker fails, with its traceback.
    """
    kind = default_device_type()
    number = num_processes
    if number is None:
        number = 1 if kind in ("cpu", "mps") else device_count(kind)
    found = Problems()
    if mixed_precision not in PrecisionType.list():
        found.append(unknown_choice("mixed_precision", mixed_precision, PrecisionType.list()))
    found += _count_problems(num_processes=(number, 1), num_nodes=(num_nodes, 1))
    found += _count_problems(node_rank=(node_rank, 0), max_restarts=(max_restarts, 0))
    found.raise_if()
    number, num_nodes, node_rank = int(number), int(num_nodes), int(node_rank)
    if not 0 <= node_rank < max(1, num_nodes):
        found.add(f"node_rank={node_rank}", f"it is from 0 to {num_nodes - 1}", "Correct it.")
    if kind not in ("cpu", "mps") and device_count(kind) < number:
        rule = f"each process has a device of its own, and this machine has {device_count(kind)}"
        found.add(f"num_processes={number}", rule, "Give fewer.")
    found.raise_if()
    if number * num_nodes == 1:
        _check_precision(mixed_precision)
        with env.patched(ACCELERATE_MIXED_PRECISION=mixed_precision):
            function(*args)
        return
    _check_forkable()
    configuration = _configuration(
        number,
        int(use_port),
        master_addr,
        node_rank,
        num_nodes,
        rdzv_backend,
        rdzv_endpoint,
        rdzv_conf or {},
        rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
    )
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision}
    if env.flag("ACCELERATE_DEBUG_MODE"):  # so that a mistake costs seconds
        _fork(PartialState, (), variables, configuration)
    _fork(function, args, variables, configuration)


def debug_launcher(
    function: Callable[..., object], args: Sequence[object] = (), num_processes: int = 2
) -> None:
    """Run a function on several processes of the CPU, to debug it.

    Args:
        function: called with `args` on each process.
        args: its arguments; forks need not pickle them.
        num_processes: how many.

    Raises:
        ConfigError: if there is no process, or an argument is of the wrong kind.
        StateError: if this process has an Accelerator or a process group, or has touched a GPU.
        RuntimeError: if a worker fails, with its traceback.
    """
    _count_problems(num_processes=(num_processes, 1)).raise_if()
    _check_forkable()
    configuration = _configuration(int(num_processes), max_restarts=0)
    _fork(function, args, {"ACCELERATE_USE_CPU": "1"}, configuration)


def _count_problems(**counts: tuple[object, int]) -> Problems:
    """Return which numbers are no whole ones, or less than the least of each."""
    found = Problems()
    for name, (value, least) in counts.items():
        if not isinstance(value, Integral) or value < least:
            rule = f"it is a whole number, at least {least}"
            found.add(f"{name}={value!r}", rule, f"Give {least} or more.")
    return found


def _check_precision(mixed_precision: str) -> None:
    """Refuse a precision that the Accelerator of this process, which a function gets, lacks."""
    if mixed_precision == "no" or not is_initialized():
        return
    present = AcceleratorState().mixed_precision
    if present != mixed_precision:
        raise StateError(
            f"mixed_precision={mixed_precision!r}, and this process has an Accelerator, which the "
            f"function gets, of precision {present!r}. Build it inside the function; restart the "
            "notebook's kernel first."
        )


def _fork(
    function: Callable[..., object],
    args: Sequence[object],
    variables: Mapping[str, str],
    configuration: LaunchConfig,
) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # The agent expects to be found by its own variables alone, and counts GPUs, which would
    # otherwise make them unusable in forks.
    own = dict.fromkeys(OF_WORKERS) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        with env.patched(**own, **OWN_STORE, **variables), _handlers_restored():
            launch = elastic_launch(configuration, _worker)
            try:
                launch(function, tuple(args), folder)
            except ChildFailedError as error:
                raise RuntimeError(_first_failure(Path(folder), error)) from None
            except SignalException as error:
                raise KeyboardInterrupt(str(error)) from error


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Restore the signal handlers that torchelastic replaces, those of a notebook's kernel."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_forkable() -> None:
    if not hasattr(os, "fork"):
        rule = "notebooks start processes by fork, which this operating system lacks"
        raise ConfigError.of(f"sys.platform={sys.platform!r}", rule, "Use accel launch SCRIPT.")
    if PartialState._shared_state:
        raise StateError(
            "This process has an Accelerator, which its forks would share. Build it inside the "
            "function; restart the notebook's kernel first."
        )
    if torch.distributed.is_initialized():
        raise StateError(
            "This process is in a process group, which its forks cannot use. Call "
            "torch.distributed.destroy_process_group() first, or restart the notebook's kernel."
        )
    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_initialized():
            raise StateError(
                f"This process has used {name}, which its forks cannot use any more. Restart the "
                f"notebook's kernel, and use {name} only inside the function."
            )


def _configuration(
    num_processes: int,
    port: int = 0,
    address: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    backend: str = "static",
    endpoint: str = "",
    configuration: Mapping[str, object] | None = None,
    run_id: str = "none",
    **options: Any,
) -> LaunchConfig:
    """Return where the nodes of a launch meet; `options` say how its agent watches the workers."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    settings: dict[str, object] = {"rank": node_rank} if backend == "static" else {}
    if num_nodes == 1 and not endpoint and backend == "static" and not port:
        backend, endpoint, run_id = "c10d", "localhost:0", uuid.uuid4().hex
        settings = {}
    elif not endpoint:
        if node_rank == 0 and address in ANY_ADDRESS:
            _check_free(port)
        endpoint = f"{address}:{port}"
    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_processes,
        run_id=run_id,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs={**settings, **(configuration or {})},
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
        # A lookup of this host's full name takes seconds where no name server answers.
        local_addr="localhost" if num_nodes == 1 else None,
        **options,
    )


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a program of this machine listens at a TCP port.

    Args:
        port: None: 29500, where launchers rendezvous by default.
    """
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", DEFAULT_PORT if port is None else port)) == 0


class PrepareForLaunch:
    """A function for `torch.multiprocessing.start_processes`, which gives it the process's index.

    Of the distributed types ``MULTI_…``, the call sets RANK and LOCAL_RANK; whoever starts the
    processes sets WORLD_SIZE, MASTER_ADDR and MASTER_PORT, on several nodes also NODE_RANK and
    NPROC.

    Args:
        launcher: called with the arguments behind the index.
        distributed_type: a `DistributedType`, or its name.
        debug: refused: `debug_launcher` starts processes to debug a function.

    Raises:
        ConfigError: for `debug`, or an unknown type.
    """

    def __init__(
        self,
        launcher: Callable[..., object],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        if debug:
            remedy = "Call debug_launcher(function, args) instead."
            raise ConfigError.of(
                "PrepareForLaunch(debug=True)", "processes rendezvous by their variables", remedy
            )
        self.launcher = launcher
        names = [kind.value for kind in DistributedType]
        if str(distributed_type) not in names:
            raise ConfigError(unknown_choice("distributed_type", str(distributed_type), names))
        self.distributed_type = distributed_type
        self._is_ranked = str(distributed_type).startswith("MULTI_")
        self.debug = debug

    def __call__(self, index: int, *args: object) -> None:
        """Set the rank of this process and call the function.

        Args:
            index: of this process on its node.
            args: of the function.
        """
        values: dict[str, object] = {"FORK_LAUNCHED": 1}
        if self._is_ranked:
            node = env.integer("NODE_RANK", 0) * env.integer("NPROC", 1)
            values |= {"LOCAL_RANK": index, "RANK": node + index}
        env.set_values(values)
        self.launcher(*args)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            rule = f"processes cannot meet there ({error.strerror})"
            raise ConfigError.of(f"use_port={port}", rule, "Give a free one, or 0.") from None


def _worker(function: Callable[..., object], args: Sequence[object], folder: str) -> None:
    """Call the function in a fork; leave the traceback of a failure to the parent."""
    parent_watch.die_with(os.getppid())
    # The agent's handler came with the fork; one of Python's waits for a collective to return,
    # which it does not where another rank failed.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # OpenMP's other threads did not survive the fork
    try:
        function(*args)
    except BaseException:
        place = Path(folder) / f"{env.read('RANK')}.txt"
        place.write_text(traceback.format_exc(), encoding="utf-8")
        raise


def _first_failure(folder: Path, error: ChildFailedError) -> str:
    """Return the signal or the traceback that ended the first worker, or what the agent says."""
    killed = [(rank, -one.exitcode) for rank, one in error.failures.items() if one.exitcode < 0]
    # SIGTERM is what the agent ends the others with.
    killed = [(rank, number) for rank, number in killed if number != signal.SIGTERM]
    if killed:
        rank, number = killed[0]
        return f"The process of rank {rank} was ended by {signal.Signals(number).name}."
    found = sorted(folder.glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        return str(error)
    return f"The process of rank {found[0].stem} failed:\n{found[0].read_text(encoding='utf-8')}"
