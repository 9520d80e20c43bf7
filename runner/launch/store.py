"""Stores by which the processes of a run find each other, and under torchrun their job.

Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch._C import _DistError
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from accel.comm.rendezvous import connect_store
from accel.machine.env import Environment
from accel.machine.errors import StateError

KEY = "run_dir"
# Composing a recipe may import large packages of the user's.
WAIT = timedelta(minutes=10)
# The host of a store serves for as long as it is referenced.
_KEPT: list[Store] = []


def hosted(address: str = "localhost") -> TCPStore:
    """Host a store for the workers of one attempt, on a port that is free."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False)


def connect(prefix: str = "job", timeout: timedelta = WAIT) -> Store:
    """Return the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it where its launcher does not."""
    here = Environment.read()
    if here.master_addr is None or here.master_port is None:
        raise StateError("A launcher sets MASTER_ADDR and MASTER_PORT beside WORLD_SIZE.")
    store = connect_store(here, timeout)
    _KEPT.append(store)
    return PrefixStore(f"runner/{here.run_id}/{here.restart_count}/{prefix}", store)


# -- under torchrun, rank 0 composes the job; the other ranks receive its folder ---------------


def publish(folder: Path | None) -> None:
    """Send the other ranks the folder of the frozen job (rank 0); None: nothing is left to do."""
    connect().set(KEY, "" if folder is None else str(folder))


def receive() -> Path | None:
    """Wait for rank 0 and return the folder of the job (other ranks); None: nothing is to be done.

    Raises:
        StateError: if rank 0 does not answer.
    """
    try:
        folder = connect().get(KEY).decode()
        return Path(folder) if folder else None
    except _DistError as error:
        cause = str(error).partition("\n")[0]
        raise StateError(
            f"Rank 0 named no run directory, for which others wait {WAIT} at most ({cause}). "
            "Its own output has the reason."
        ) from error
