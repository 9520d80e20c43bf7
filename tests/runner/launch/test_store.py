"""How the ranks of torchrun, mpirun and srun get the run directory (R6, R9)."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from runner.recipe.processes import Adopted
from tests import slurm
from tests.helpers import python, ran, run_distributed

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
RECIPE = ("trainer.max_steps=2", "tracker.log_with=[]", "model.dropout=0")


def adopt(folder: str) -> tuple[str, int]:
    """Hand the run directory from rank 0 to rank 1, then form a process group as usual."""
    import torch.distributed as dist

    from runner.launch import store
    from runner.recipe import processes

    place = processes.adopted()
    assert isinstance(place, Adopted)
    if place.rank == 0:
        store.publish(Path(folder))
        received = Path(folder)
    else:
        received = store.receive()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return str(received), size


def test_other_ranks_of_torchrun_receive_the_run_directory(tmp_path: Path) -> None:
    assert run_distributed(adopt, 2, str(tmp_path)) == [(str(tmp_path), 2)] * 2


def train(launcher: tuple[str, ...], folder: Path, **variables: str) -> None:
    """Train with a launcher's command line; check that its processes are one run."""
    line = [*launcher, *python("-m", "runner", *RECIPE, f"output_dir={folder / 'runs'}")]
    answer = ran(line, folder, OMP_NUM_THREADS="1", **variables)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (run,) = (folder / "runs" / "digits").iterdir()
    assert [path.name for path in (run / "checkpoints").glob("checkpoint_*")] == ["checkpoint_0"]
    assert json.loads((run / "summary.json").read_text())["step"] == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun (openmpi-bin) not installed")
def test_processes_of_mpirun_are_one_run(tmp_path: Path) -> None:
    train(MPIRUN, tmp_path)


@pytest.mark.slow
@pytest.mark.slurm
def test_tasks_of_srun_are_one_run(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        with slurm.cluster(Path(folder)) as variables:
            train(("srun", "--ntasks=2", "--overcommit"), tmp_path, **variables)
