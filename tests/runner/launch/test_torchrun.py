"""How the ranks of torchrun get the run directory."""

from __future__ import annotations

from pathlib import Path

from runner.config.processes import Adopted
from tests.helpers import run_distributed


def adopt(folder: str) -> tuple[str, int]:
    """Hand the run directory from rank 0 to rank 1, then form a process group as usual."""
    import torch.distributed as dist

    from runner.config import processes
    from runner.launch import torchrun

    place = processes.adopted()
    assert isinstance(place, Adopted)
    if place.rank == 0:
        torchrun.publish(Path(folder))
        received = Path(folder)
    else:
        received = torchrun.receive()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return str(received), size


def test_other_ranks_of_torchrun_receive_the_run_directory(tmp_path: Path) -> None:
    assert run_distributed(adopt, 2, str(tmp_path)) == [(str(tmp_path), 2)] * 2
