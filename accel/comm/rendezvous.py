"""The TCP store at which the processes of a job rendezvous."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from accel.machine.env import Environment


def connect_store(
    environment: Environment, timeout: timedelta, world_size: int | None = None
) -> TCPStore:
    """Return the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it where the agent does not.

    Its host serves for as long as the store is referenced there. Keys want a prefix per attempt.
    Without an address, it is on a free local port. `timeout` is of each operation; `world_size`
    counts the processes that connect, None if that is not known.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
    """
    alone = world_size == 1  # whatever rank a launcher around it has told
    return TCPStore(
        environment.master_addr or "localhost",
        environment.master_port or 0,
        world_size=world_size,
        is_master=(alone or (environment.rank or 0) == 0) and not environment.agent_store,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
