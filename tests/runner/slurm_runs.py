"""Runs that are submitted to a Slurm of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from runner.runs import directory
from tests.helpers import python, ran, with_path
from tests.slurm import SECONDS, Cluster, wait_until

QUICK = (
    *("tracker.log_with=[]", "data.augment=false", "model.width=4", "trainer.epochs=null"),
    *("checkpoint.every_epochs=null", "trainer.log_every=50", "trainer.eval_every=1000"),
    *("deterministic=true", "distributed.num_threads=1"),
)
# Steps enough to be interrupted, and a checkpoint soon after the start.
LONG = (*QUICK, "trainer.max_steps=3000", "checkpoint.every_steps=100")
ONE_EACH = ("submit.nodes=2", "submit.tasks_per_node=1", "distributed=multi_cpu")


def environment(cluster: Cluster) -> dict[str, str]:
    """Return the variables of a command on the cluster."""
    return with_path(**cluster.variables, OMP_NUM_THREADS="1")


def command(cluster: Cluster, cwd: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """Give a command of the runner's on the cluster."""
    return ran(python("-m", "runner", *line), cwd, 3 * SECONDS, **environment(cluster))


def submitted(cluster: Cluster, cwd: Path, *line: str) -> tuple[str, Path]:
    """Submit a run; return its job and its directory."""
    answer = command(cluster, cwd, "submit", *line)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = dict(one.split(":", 1) for one in answer.stdout.splitlines() if ":" in one)
    return told["job"].strip(), Path(told["run"].strip())


def trained_here(cluster: Cluster, cwd: Path, *line: str) -> Path:
    """Train a run on this machine without Slurm; return its directory."""
    answer = command(cluster, cwd, *line, f"run_dir={cwd / 'here'}")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return cwd / "here"


def weights(run_dir: Path) -> bytes:
    """Return the file of a run's newest weights."""
    newest = directory.newest_checkpoint(run_dir)
    assert newest is not None
    return (newest / "model.safetensors").read_bytes()


def log(run_dir: Path) -> str:
    """Return the output of a run's job."""
    return "".join(path.read_text() for path in run_dir.glob("logs/slurm-*.out"))


def wait_for_checkpoint(run_dir: Path) -> None:
    """Wait until a run has saved a first state."""
    wait_until(
        lambda: list(run_dir.glob("checkpoints/checkpoint_*/manifest.json")), "no checkpoint"
    )


def wait_for_end(cluster: Cluster, job_id: str, run_dir: Path) -> None:
    """Wait until a job is complete; fail with its output if it ends otherwise."""
    ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
    state = cluster.wait_for(job_id, *ends, seconds=2 * SECONDS)
    assert state == "COMPLETED", (state, log(run_dir))
