"""Where a process computes: a table of device kinds; no other module asks for a kind."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from accel.machine import env
from accel.machine.errors import ConfigError, Problem, unknown_choice
from accel.machine.imports import is_available, require


class DeviceKind:
    """Operations on one kind of device; the defaults are those of torch's accelerators.

    Args:
        name: type of its `torch.device`.

    Attributes:
        copies_in_order: whether copies to it need not be waited for. They are queued before the
            kernels that read them, and the host's memory is kept until then.
    """

    copies_in_order = True

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self) -> int:
        """Return how many devices of this kind the process can use."""
        module = getattr(torch, self.name, None)
        return int(module.device_count()) if module is not None and module.is_available() else 0

    def choose(self, index: int | None, local_rank: int, own_devices: int | None) -> torch.device:
        """Return the device of a process; arguments as of `resolve_device`."""
        count = self.count()
        default = 0 if own_devices == count else local_rank
        wanted = default if index is None else index
        if wanted >= count:
            raise ConfigError(_too_few(self.name, count, wanted))
        return self.numbered(wanted)

    def numbered(self, index: int) -> torch.device:
        """Return the device `index`."""
        return torch.device(self.name, index)

    def generator(self) -> ModuleType | None:
        """Return the module with the device's `get_rng_state`; None for the CPU."""
        found: ModuleType = getattr(torch, self.name)
        return found

    def backend(self) -> str:
        """Return the backend through which processes exchange tensors on the device."""
        return str(torch.distributed.get_default_backend_for_device(self.name))

    def seed(self, seed: int) -> None:
        """Seed the generator of the process's device."""

    def use(self, device: torch.device) -> None:
        """Make `device` the current one of its kind."""
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)

    def free_memory(self, index: int) -> int:
        """Return the bytes that are free on the device `index`."""
        return int(torch.get_device_module(self.name).mem_get_info(index)[0])

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work queued on `device` is done."""
        torch.accelerator.synchronize(device)


class Cpu(DeviceKind):
    """The CPU, which processes share and which queues nothing."""

    copies_in_order = False

    def generator(self) -> None:
        return None

    def choose(self, index: int | None, local_rank: int, own_devices: int | None) -> torch.device:
        return torch.device(self.name)

    def use(self, device: torch.device) -> None:
        pass

    def synchronize(self, device: torch.device) -> None:
        pass


class Mps(DeviceKind):
    """Apple's GPU, the only one of its machine."""

    copies_in_order = False

    def numbered(self, index: int) -> torch.device:
        return torch.device(self.name)

    def use(self, device: torch.device) -> None:
        pass


class Xla(DeviceKind):
    """All TPU cores of the machine, as one device of one process (SPMD), through torch_xla.

    With ``PJRT_DEVICE=CPU`` it is the CPU, in CPU_NUM_DEVICES devices.

    Source: https://docs.pytorch.org/xla/release/r2.9/perf/spmd_basic.html
    """

    copies_in_order = False

    def count(self) -> int:
        return int(is_available("torch_xla"))

    def choose(self, index: int | None, local_rank: int, own_devices: int | None) -> torch.device:
        self._module("runtime")
        return super().choose(index, local_rank, own_devices)

    def numbered(self, index: int) -> torch.device:
        runtime = self._module("runtime")
        processes = max(runtime.process_count(), runtime.world_size())
        if processes > 1:
            raise ConfigError.of(
                f"device='xla' in {processes} processes of torch_xla",
                "one process drives all devices of its machine, and there is one machine",
                "Call the function without torch_xla.launch, on a single machine.",
            )
        if runtime.addressable_runtime_device_count() > 1 and not runtime.is_spmd():
            runtime.use_spmd()
        found: torch.device = importlib.import_module("torch_xla").device()
        return found

    def generator(self) -> ModuleType:
        return self._module("core.xla_model")

    def backend(self) -> str:
        return "gloo"  # of one process, that an engine or a launcher wants a group of

    def seed(self, seed: int) -> None:
        device = str(self.numbered(0))
        self.generator().set_rng_state(seed, device)

    def use(self, device: torch.device) -> None:
        pass

    def free_memory(self, index: int) -> int:
        raise ConfigError.of(
            "a device map of this machine's memory",
            "torch_xla places models by itself",
            "Give max_memory and devices by name, or unset PJRT_DEVICE.",
        )

    def synchronize(self, device: torch.device) -> None:
        self._module("core.xla_model").wait_device_ops()

    def _module(self, name: str) -> Any:
        return require(f"torch_xla.{name}", "device='xla'", package="torch_xla", extra="xla")


KINDS = {
    "cpu": Cpu("cpu"),
    "mps": Mps("mps"),
    "xla": Xla("xla"),
    **{n: DeviceKind(n) for n in ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu")},
}


def device_kind(name: str) -> DeviceKind:
    """Return a row of the table, or raise `ConfigError` for an unknown kind."""
    if name not in KINDS:
        raise ConfigError(unknown_choice("device", name, KINDS))
    return KINDS[name]


def _kind_of(device: torch.device) -> DeviceKind:
    return KINDS.get(device.type) or DeviceKind(device.type)


def resolve_device(
    kind: str | None, local_rank: int, own_devices: int | None = None
) -> torch.device:
    """Choose the device of one process; it has an index unless it is the only one of its kind.

    Args:
        kind: "cpu", "cuda", … possibly with an index ("cuda:1"); None or "auto": the machine's
            accelerator if there is one, else the CPU.
        local_rank: index of the process on its node, and so of its device.
        own_devices: number of devices that the launcher shows this process alone, which takes the
            first of them; None: it sees those of its node.

    Raises:
        ConfigError: if there is no such device, or there are fewer than processes.
    """
    if kind in (None, "auto"):
        kind = default_device_type()
    name, _, index = str(kind).partition(":")
    number = int(index) if index.isdigit() else None
    return device_kind(name).choose(number, local_rank, own_devices)


def default_device_type() -> str:
    """Return the kind of this machine's accelerator, or "cpu"."""
    if env.read("PJRT_DEVICE") and is_available("torch_xla"):
        return "xla"
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator.type
    return "cpu"


def device_count(name: str) -> int:
    """Return how many devices of a kind there are, or raise `ConfigError` for an unknown kind."""
    return device_kind(name).count()


def _too_few(name: str, count: int, wanted: int) -> Problem:
    if count == 0:
        return Problem(
            f"device={name!r}",
            "this machine has no such device that this build of torch can use",
            "Use device='auto' or cpu=True (in the environment: ACCELERATE_USE_CPU=1).",
        )
    return Problem(
        f"device {name}:{wanted}",
        f"this machine has {count} {name} device{'s' if count > 1 else ''}, and each process of a "
        f"node takes one of its own (at least {wanted + 1} are wanted)",
        f"Start at most {count} process{'es' if count > 1 else ''} per node, or use cpu=True.",
    )


def process_group_backend(device_type: str) -> str:
    """Return the backend through which processes exchange tensors on `device_type`.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#backends
    """
    return device_kind(device_type).backend()


def use_device(device: torch.device) -> None:
    """Make `device` the current one of its kind, so that libraries allocate there."""
    _kind_of(device).use(device)


def copies_in_order(device: torch.device) -> bool:
    """Return whether copies to `device` need not be waited for."""
    return _kind_of(device).copies_in_order


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    _kind_of(device).synchronize(device)
