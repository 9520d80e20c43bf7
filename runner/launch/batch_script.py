"""The batch script of a job on Slurm, and how many processes it starts. Free of torch.

Source: https://slurm.schedmd.com/sbatch.html; https://slurm.schedmd.com/srun.html
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from accel.machine.errors import ConfigError, Problem
from runner.exit_codes import STOPPED
from runner.recipe.nodes import Submit
from runner.recipe.processes import DEFAULT_CPU_PROCESSES
from runner.recipe.schema import Distributed, Recipe
from runner.runs.sessions import run_dir_of

# Kinds of `distributed` that describe one machine: srun starts as many processes on each node.
ONE_MACHINE = ("none", "auto", "multi_cpu", "multi_gpu")
TASK = "from runner.launch.slurm_task import main; main()"


def tasks_per_node(recipe: Recipe) -> int:
    """Return how many processes a job has on each node.

    Raises:
        ConfigError: if `submit` and `distributed` contradict each other.
    """
    submit, distributed = recipe.submit, recipe.distributed
    if distributed.kind not in ONE_MACHINE:
        rule = "Slurm starts the processes of all nodes"
        remedy = "Choose distributed=multi_gpu or multi_cpu, and give submit.nodes=…"
        raise ConfigError.of(f"distributed={distributed.kind} with runner submit", rule, remedy)
    number = _tasks(submit, distributed)
    ConfigError.raise_if(list(_contradictions(submit, distributed, number)))
    return number


def _tasks(submit: Submit, distributed: Distributed) -> int:
    if submit.tasks_per_node is not None:
        return submit.tasks_per_node
    total = distributed.num_processes
    if total is not None:
        if total % submit.nodes:
            value = f"distributed.num_processes={total} with submit.nodes={submit.nodes}"
            rule = "each node has the same number of processes"
            raise ConfigError.of(value, rule, "Give a multiple of the nodes.")
        return total // submit.nodes
    if _on_gpus(submit, distributed):
        return submit.gpus_per_node or 1
    return 1 if distributed.kind == "none" else DEFAULT_CPU_PROCESSES


def _on_gpus(submit: Submit, distributed: Distributed) -> bool:
    if distributed.kind == "auto":
        return submit.gpus_per_node is not None and distributed.device != "cpu"
    return distributed.kind == "multi_gpu"


def _contradictions(submit: Submit, distributed: Distributed, number: int) -> Iterator[Problem]:
    total = distributed.num_processes
    if total not in (None, number * submit.nodes):
        yield Problem(
            f"distributed.num_processes={total}",
            f"{submit.nodes} nodes with {number} processes each are {number * submit.nodes}",
            "Leave distributed.num_processes out.",
        )
    if distributed.kind == "multi_gpu" and submit.gpus_per_node is None:
        yield Problem(
            "distributed=multi_gpu without submit.gpus_per_node",
            "Slurm gives a job the GPUs that it asks for",
            "Give submit.gpus_per_node=…",
        )
    if submit.gpus_per_node not in (None, number):
        yield Problem(
            f"submit.gpus_per_node={submit.gpus_per_node} with {number} processes on each node",
            "each process has a GPU of its own",
            f"Choose distributed=multi_gpu, or give submit.gpus_per_node={number}.",
        )
    if distributed.kind == "none" and number * submit.nodes > 1:
        yield Problem(
            f"distributed=none with {number * submit.nodes} processes",
            "distributed=none is one process",
            "Say where the processes run: distributed=multi_cpu or distributed=multi_gpu.",
        )


def text(recipe: Recipe, folder: Path, cwd: str) -> str:
    """Return the batch script of a job that is frozen in the session `folder`."""
    submit, run_dir = recipe.submit, run_dir_of(folder)
    options = "\n".join(f"#SBATCH {option}" for option in _options(recipe, run_dir, cwd))
    setup = "\n".join(submit.setup) or ":"
    stopped = shlex.quote(f"{run_dir}/logs") + "/slurm-$SLURM_JOB_ID.stopped"
    again = 'scontrol requeue "$SLURM_JOB_ID"' if submit.requeue else ":"
    return f"""\
#!/bin/bash
{options}

# `runner submit` has written this file. After a requeue Slurm runs it again: the run goes on from
# its newest complete checkpoint, in the same directory.
cancelled=
trap 'cancelled=yes' TERM  # of scancel and requeue: wait for the processes, which save and stop
rm -f {stopped}
{setup}
{_srun(recipe, folder, cwd)}
code=$?
case $code in
  0) if [ -e {stopped} ]; then code={STOPPED}; fi ;;
  138|143) code={STOPPED} ;;  # SIGUSR1, SIGTERM: stopped before the program could listen
esac
# Before the time limit (SIGUSR1) and at a preemption (SIGTERM) Slurm signals the processes alone.
if [ "$code" = {STOPPED} ] && [ -z "$cancelled" ]; then
  {again}
fi
exit $code
"""


def _options(recipe: Recipe, run_dir: Path, cwd: str) -> Iterator[str]:
    submit = recipe.submit
    yield f"--job-name={_quoted(recipe.name)}"
    yield f"--chdir={_quoted(cwd)}"
    # sbatch replaces %: a literal one is doubled.
    yield f"--output={_quoted(str(run_dir).replace('%', '%%') + '/logs/slurm-%j.out')}"
    yield "--open-mode=append"
    yield f"--nodes={submit.nodes}"
    yield f"--ntasks-per-node={tasks_per_node(recipe)}"
    yield f"--signal=USR1@{submit.signal_delay_s}"
    yield "--requeue" if submit.requeue else "--no-requeue"
    if submit.seconds is not None:
        minutes, seconds = divmod(submit.seconds, 60)
        yield f"--time={minutes}:{seconds:02}"
    for name in ("partition", "account", "qos", "constraint", "gpus_per_node", "cpus_per_task"):
        value = getattr(submit, name)
        if value is not None:
            yield f"--{name.replace('_', '-')}={value}"
    if submit.mem is not None:
        yield f"--mem={submit.mem}"
    yield from submit.extra


def _quoted(text: str) -> str:
    """Return a value as sbatch reads it in a script: quoted where it has spaces or quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return text if shlex.quote(text) == text else f'"{escaped}"'


def _srun(recipe: Recipe, folder: Path, cwd: str) -> str:
    submit = recipe.submit
    options = ["--kill-on-bad-exit=1", f"--ntasks-per-node={tasks_per_node(recipe)}"]
    if submit.cpus_per_task is not None:  # srun does not take it from sbatch's variables
        options.append(f"--cpus-per-task={submit.cpus_per_task}")
    path = [str(Path(__file__).resolve().parents[2]), cwd]
    code = f"import sys; sys.path += {json.dumps(path)}; {TASK}"
    return shlex.join(["srun", *options, sys.executable, "-P", "-c", code, str(folder)])
