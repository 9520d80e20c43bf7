"""Where a process computes. Any device that torch knows; no other module asks for its kind."""

from __future__ import annotations

import torch

from accel.machine.errors import ConfigError, Problem, unknown_choice

KNOWN = ("cpu", "cuda", "xpu", "mps", "npu", "mlu", "musa", "sdaa", "hpu")


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
    if name == "cpu":
        return torch.device("cpu")
    count = device_count(name)
    default = 0 if own_devices == count else local_rank
    wanted = int(index) if index.isdigit() else default
    if wanted >= count:
        raise ConfigError(_too_few(name, count, wanted))
    return torch.device(name) if name == "mps" else torch.device(name, wanted)


def default_device_type() -> str:
    """Return the kind of this machine's accelerator, or "cpu"."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator.type
    return "cpu"


def device_count(name: str) -> int:
    """Return how many devices of a kind there are, or raise `ConfigError` for an unknown kind."""
    if name not in KNOWN:
        raise ConfigError(unknown_choice("device", name, KNOWN))
    module = getattr(torch, name, None)
    if module is None or not module.is_available():
        return 0
    return int(module.device_count())


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
    return str(torch.distributed.get_default_backend_for_device(device_type))


def use_device(device: torch.device) -> None:
    """Make `device` the current one of its kind, so that libraries allocate there."""
    if device.type not in ("cpu", "mps") and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def copies_in_order(device: torch.device) -> bool:
    """Return whether copies to `device` need not be waited for.

    They are queued before the kernels that read them, and the host's memory is kept until then.
    """
    return device.type not in ("cpu", "mps")


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
