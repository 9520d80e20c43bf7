"""R3: the batch script: processes on each node, options of sbatch, what it does after a stop."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel.machine.errors import ConfigError
from runner.launch import slurm
from runner.recipe.machines import Submit
from runner.recipe.schema import Distributed, Recipe


def recipe(distributed: dict[str, Any] | None = None, **submit: Any) -> Recipe:
    return Recipe(
        name="digits", distributed=Distributed(**(distributed or {})), submit=Submit(**submit)
    )


@pytest.mark.parametrize(
    ("distributed", "submit", "tasks"),
    [
        ({}, {}, 1),
        ({"kind": "multi_cpu"}, {}, 2),
        ({"kind": "multi_cpu", "num_processes": 6}, {"nodes": 2}, 3),
        ({"kind": "multi_gpu"}, {"gpus_per_node": 8, "nodes": 4}, 8),
        ({"kind": "auto"}, {"gpus_per_node": 4}, 4),
    ],
)
def test_processes_on_each_node(
    distributed: dict[str, Any], submit: dict[str, Any], tasks: int
) -> None:
    assert slurm.tasks_per_node(recipe(distributed, **submit)) == tasks


@pytest.mark.parametrize(
    ("distributed", "submit", "told"),
    [
        ({}, {"nodes": 2}, "distributed=none is one process"),
        ({}, {"gpus_per_node": 8}, "each process has a GPU of its own"),
        ({"kind": "multi_gpu"}, {}, "Give submit.gpus_per_node"),
        ({"kind": "multi_cpu", "num_processes": 3}, {"nodes": 2}, "same number of processes"),
        ({"kind": "multi_cpu", "num_processes": 3}, {"tasks_per_node": 2}, "Leave distributed"),
        ({"kind": "multi_gpu"}, {"gpus_per_node": 4, "tasks_per_node": 2}, "gpus_per_node=2"),
    ],
)
def test_contradictions_are_refused(
    distributed: dict[str, Any], submit: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        slurm.tasks_per_node(recipe(distributed, **submit))


def test_what_sbatch_reads() -> None:
    asked = {"partition": "gpu", "time": "1-00:00:00", "mem": "64G", "cpus_per_task": 4}
    found = recipe({}, extra=["--mail-type=FAIL"], setup=["module load cuda"], **asked)
    text = slurm.text(found, Path("/runs/a b%c"), "/home/me")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert {
        *("--job-name=digits", "--chdir=/home/me", '--output="/runs/a b%%c/logs/slurm-%j.out"'),
        *("--partition=gpu", "--time=1440:00", "--mem=64G", "--cpus-per-task=4", "--requeue"),
        *("--signal=USR1@120", "--nodes=1", "--ntasks-per-node=1", "--mail-type=FAIL"),
    } <= set(options)
    assert text.index("module load cuda") < text.index("srun")
    assert "srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpus-per-task=4" in text


def run_script(folder: Path, srun: str, **submit: Any) -> tuple[int, list[str]]:
    """Run the script with programs in the places of srun and scontrol; return code and calls."""
    run_dir, programs = folder / "a run", folder / "bin"
    (run_dir / "logs").mkdir(parents=True)
    programs.mkdir()
    stopped = f"'{run_dir}/logs/slurm-7.stopped'"
    for name, body in {
        "srun": srun.format(stopped=stopped),
        "scontrol": f"echo $* >> '{folder}/calls'",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    script = folder / "submit.sh"
    script.write_text(slurm.text(recipe(**submit), run_dir, str(folder)))
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    answer = subprocess.run(["bash", script], env=variables, timeout=60)
    calls = folder / "calls"
    return answer.returncode, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(
    ("srun", "submit", "code", "calls"),
    [
        ("exit 0", {}, 0, []),
        ("exit 1", {}, 1, []),
        ("touch {stopped}", {}, 75, ["requeue 7"]),
        ("touch {stopped}", {"requeue": False}, 75, []),
        ("touch {stopped}; kill -TERM $PPID", {}, 75, []),  # scancel signals the script, too
        ("echo max_time > {stopped}", {}, 75, []),  # the run's own limit
        ("kill -TERM $$", {}, 75, ["requeue 7"]),  # before the program could listen
        ("exit 137", {}, 137, []),
    ],
)
def test_what_follows_the_end_of_the_processes(
    srun: str, submit: dict[str, Any], code: int, calls: list[str], tmp_path: Path
) -> None:
    assert run_script(tmp_path, srun, **submit) == (code, calls)
