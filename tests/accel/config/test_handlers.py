"""Kwargs handlers: what they hold, what they refuse, and what reaches the objects of torch.

Holds E1, E5.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel import Accelerator, AutocastKwargs, GradScalerKwargs
from accel.state import AcceleratorState
from accel.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from tests.helpers import run_distributed

# -- what differs ------------------------------------------------------------------------------


def test_only_what_differs_is_handed_on() -> None:
    assert AutocastKwargs(enabled=True, cache_enabled=False).to_kwargs() == {"cache_enabled": False}
    assert GradScalerKwargs(8.0, growth_interval=2000).to_kwargs() == {"init_scale": 8.0}
    handler = DistributedDataParallelKwargs(check_reduction=True, comm_hook="fp16", dim=0)
    assert handler.to_kwargs() == {"check_reduction": True, "comm_hook": "fp16"}
    changed = DistributedDataParallelKwargs()
    changed.comm_state_option["warm_start"] = False
    assert changed.to_kwargs() == {"comm_state_option": {"warm_start": False}}
    assert DistributedDataParallelKwargs().to_kwargs() == {}


def test_a_handler_of_the_users_own_is_understood() -> None:
    @dataclass
    class Mine(GradScalerKwargs):
        init_scale: float = 4.0
        patience: int = 2

        def to_kwargs(self) -> dict[str, Any]:
            return {k: v for k, v in super().to_kwargs().items() if k != "patience"}

    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[Mine()])
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 4.0


# -- autocast and the gradient scaler ------------------------------------------------------------


def test_autocast_keeps_casts_of_weights_unless_it_is_told_not_to() -> None:
    found = []
    for cache_enabled in (None, True, False):
        AcceleratorState._reset_state()
        handler = AutocastKwargs(cache_enabled=cache_enabled)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler])
        with accelerator.autocast():
            found.append(torch.is_autocast_cache_enabled())
    assert found == [True, True, False]


def test_autocast_is_off_where_it_is_not_enabled() -> None:
    found = []
    for enabled in (True, False):
        AcceleratorState._reset_state()
        handler = AutocastKwargs(enabled=enabled)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler])
        with accelerator.autocast():
            found.append(torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype)
    assert found == [torch.bfloat16, torch.float32]


def scales(steps: str, **arguments: Any) -> list[float]:
    """Return the scale after each step; of `steps`, "o" overflows and "." does not."""
    AcceleratorState._reset_state()
    handler = GradScalerKwargs(**arguments)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = []
    for step in steps:
        inputs = torch.full((1, 1), 1e30 if step == "o" else 1.0)
        accelerator.backward((model(inputs) * inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.scaler.get_scale())
    return found


def test_the_scale_of_losses_grows_and_backs_off_as_the_handler_says() -> None:
    assert scales("o.") == [32768.0, 32768.0]
    assert scales(".", init_scale=8.0) == [8.0]
    assert scales("..", init_scale=8.0, growth_interval=1) == [16.0, 32.0]
    assert scales("....", init_scale=8.0, growth_interval=2) == [8.0, 16.0, 16.0, 32.0]
    assert scales("..", init_scale=8.0, growth_interval=1, growth_factor=3.0) == [24.0, 72.0]
    assert scales("o", init_scale=8.0, backoff_factor=0.25) == [2.0]
    assert scales(".", enabled=False) == [1.0]


# -- the process group -------------------------------------------------------------------------


def group(meeting: str) -> dict[str, Any]:
    """Return what the live group says, with the handler's values and without."""
    found = {}
    handlers = {
        "default": InitProcessGroupKwargs(),
        "ours": InitProcessGroupKwargs("cpu:gloo", f"file://{meeting}", timedelta(seconds=77)),
        "seconds": InitProcessGroupKwargs(timeout=78),
    }
    for name, handler in handlers.items():
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        live = dist.distributed_c10d._get_default_group()
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        found[name] = (
            dist.get_backend_config(),
            type(store).__name__,
            live._get_backend(torch.device("cpu")).options._timeout,
            accelerator.reduce(torch.ones(())).item(),
        )
        accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
    return found


@pytest.mark.parametrize("world_size", [2])
def test_the_live_group_is_as_the_handler_says(world_size: int, tmp_path: Path) -> None:
    size, half_hour = float(world_size), timedelta(minutes=30)
    for found in run_distributed(group, world_size, str(tmp_path / "meeting")):
        default, ours = found["default"], found["ours"]
        assert default[1:] == ("TCPStore", half_hour, size)
        assert ours == ("cpu:gloo", "FileStore", timedelta(seconds=77), size)
        assert ours[0] != default[0]
        assert found["seconds"][2] == timedelta(seconds=78)


# -- DistributedDataParallel -------------------------------------------------------------------


class Parts(torch.nn.Module):
    """A model with a buffer, and a layer that is left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def wrapped(**arguments: Any) -> torch.nn.parallel.DistributedDataParallel:
    AcceleratorState._reset_state()
    handler = DistributedDataParallelKwargs(**arguments)
    return Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(Parts())


def two_steps(model: torch.nn.Module) -> bool:
    """Return whether a second step works though a layer got no gradient in the first."""
    model(torch.ones(1, 2)).sum().backward()
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return "find_unused_parameters=True" not in str(error)  # torch's advice
    return True


def buffers(**arguments: Any) -> float:
    model = wrapped(**arguments)
    model.module.counter.fill_(float(dist.get_rank()))
    model(torch.ones(1, 2))
    return float(model.module.counter)


def storages(**arguments: Any) -> int:
    """Return how many storages the gradients of a weight and its bias have."""
    model = wrapped(**arguments)
    model(torch.ones(1, 2)).sum().backward()
    used = model.module.used
    return len({grad.untyped_storage().data_ptr() for grad in (used.weight.grad, used.bias.grad)})


def ddp_effects() -> dict[str, Any]:
    return {
        "buffers": (buffers(), buffers(broadcast_buffers=False)),
        "unused": (two_steps(wrapped()), two_steps(wrapped(find_unused_parameters=True))),
        "static": (wrapped().static_graph, wrapped(static_graph=True).static_graph),
        "bucket": (wrapped().bucket_bytes_cap, wrapped(bucket_cap_mb=7).bucket_bytes_cap),
        "storages": (storages(), storages(gradient_as_bucket_view=True)),
        "dim": (wrapped().dim, wrapped(dim=1).dim),
    }


@pytest.mark.parametrize("world_size", [2])
def test_ddp_does_what_the_handler_says(world_size: int) -> None:
    for rank, found in enumerate(run_distributed(ddp_effects, world_size)):
        assert found["buffers"] == (0.0, float(rank))
        assert found["unused"] == (False, True)
        assert found["static"] == (False, True)
        assert found["bucket"] == (25 * 2**20, 7 * 2**20)
        assert found["storages"] == (2, 1)  # the bucket's
        assert found["dim"] == (0, 1)


def test_hooks_are_named_by_value_or_by_member() -> None:
    for hook in DDPCommunicationHookType:
        for spelling in (hook, hook.value):
            assert DistributedDataParallelKwargs(comm_hook=spelling).comm_hook is hook
    assert [hook.value for hook in DDPCommunicationHookType] == [
        *("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
    ]
    for wrapper in ("no", "fp16", "bf16"):
        assert DistributedDataParallelKwargs(comm_wrapper=wrapper).comm_wrapper == wrapper


def test_fields_are_skipped_by_name() -> None:
    found = AutocastKwargs(enabled=False).to_dict(ignore_keys=("cache_enabled",))
    assert found == {"enabled": False}


def test_a_communication_hook_is_registered_by_hand() -> None:
    class Model:
        registered: list[object] = []  # noqa: RUF012

        def register_comm_hook(self, state: object, hook: object) -> None:
            self.registered.append(hook)

    handler = DistributedDataParallelKwargs(comm_hook="fp16")
    handler.register_comm_hook(Model())  # type: ignore[arg-type]
    assert len(Model.registered) == 1
    DistributedDataParallelKwargs().register_comm_hook(Model())  # type: ignore[arg-type]
    assert len(Model.registered) == 1
