"""A run as a job on Slurm: frozen in its run directory, handed over by sbatch, trained by srun.

Slurm runs the batch script again after a requeue: the run goes on from its newest complete
checkpoint, in the same directory. Free of torch until the run is trained.

Source: https://slurm.schedmd.com/sbatch.html (likewise srun, squeue, scontrol, scancel)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.machine import env
from accel.machine.errors import ConfigError, Problem, StateError
from runner.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from runner.launch import failures, group, launcher, start_run, worker
from runner.recipe import processes
from runner.recipe.composition import Examined
from runner.recipe.machines import Submit
from runner.recipe.processes import DEFAULT_CPU_PROCESSES
from runner.recipe.schema import Distributed, Recipe
from runner.runs import directory, lock, numerics, outcomes, sessions
from runner.runs.job import Job
from runner.runs.json_files import TIME_IS_UP, write_json

SBATCH, SCRIPT = "sbatch", "submit.sh"
RUNNING, PENDING = "RUNNING", "PENDING"  # states of jobs
# Variables of a job that this command itself runs in; sbatch would take some of them for options.
OF_SLURM, KEPT = "SLURM_", ("SLURM_CONF", "SLURM_CLUSTERS")
# Kinds of `distributed` that describe one machine: srun starts as many processes on each node.
ONE_MACHINE = ("none", "auto", "multi_cpu", "multi_gpu")
# A node that has lost power keeps its lock until the file server's lease ends.
LOCK_SECONDS = 300.0
JOB_ID = "SLURM_JOB_ID"
TOO_SHORT = (
    "The time limit of the job left no time for a single step: it is not queued again. Give a "
    "longer submit.time."
)


# -- the batch script ----------------------------------------------------------------------


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
    has_gpus = submit.gpus_per_node is not None and distributed.device != "cpu"
    if distributed.kind == "multi_gpu" or (distributed.kind == "auto" and has_gpus):
        return submit.gpus_per_node or 1
    return 1 if distributed.kind == "none" else DEFAULT_CPU_PROCESSES


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
    submit, run_dir = recipe.submit, sessions.run_dir_of(folder)
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
if [ "$code" = {STOPPED} ] && [ -z "$cancelled" ] && [ ! -s {stopped} ]; then
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
    return shlex.join(["srun", *options, *group.command(__name__, {"folder": str(folder)}, cwd)])


# -- here ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has taken, and the run directory that it trains in."""

    job_id: str
    run_dir: Path

    @property
    def log(self) -> Path:
        """The output of the job."""
        return outcomes.log_folder(self.run_dir) / f"slurm-{self.job_id}.out"


def require_slurm(value: str = "runner submit") -> None:
    """Raise a ConfigError about a value of the command where there is no Slurm to submit to."""
    if shutil.which(SBATCH) is None:
        rule = f"there is no {SBATCH} on this machine"
        raise ConfigError.of(value, rule, "Give the command on a node of the cluster.")


@contextlib.contextmanager
def as_in_the_job(recipe: Recipe) -> Iterator[None]:
    """Give the context the variables that rank 0 of the submitted job will have."""
    local = tasks_per_node(recipe)
    world_size = local * recipe.submit.nodes
    place = worker.Place(local, world_size, 0).of_rank(0, "")
    with env.patched(**(place if world_size > 1 else dict.fromkeys(place))):
        with processes.accelerators_expected(recipe.submit.gpus_per_node or 0):
            yield


def submit(examined: Examined) -> Submitted | None:
    """Freeze a checked job in its run directory, and hand it to Slurm; None: the run is finished.

    Where Slurm refuses it, a new run leaves no directory behind.

    Raises:
        ConfigError: as `start_run.start` does, if an earlier job of the run is still queued, or if
            Slurm refuses it.
    """
    if examined.recipe.resume is not None:
        _require_no_job(Path(examined.recipe.resume))
    submitted: list[Submitted] = []

    def hand_over(job: Job, frozen: Recipe) -> int:
        submitted.append(_sbatch(job.place, frozen))
        return DONE

    start_run.start(examined, train=hand_over)
    return submitted[0] if submitted else None


def _require_no_job(run_dir: Path) -> None:
    job_id = sessions.submitted_job(run_dir)
    state = queue().get(job_id) if job_id else None
    if state:
        rule = f"Slurm's job {job_id} trains it (state {state})"
        remedy = f"Wait for its end, or end it with `scancel {job_id}`."
        raise ConfigError.of(f"resume={str(run_dir)!r}", rule, remedy)


def _sbatch(folder: Path, frozen: Recipe) -> Submitted:
    script, run_dir = folder / SCRIPT, sessions.run_dir_of(folder)
    outcomes.log_folder(run_dir)  # Slurm makes no folder
    script.write_text(text(frozen, folder, os.getcwd()), encoding="utf-8")
    given = env.copy()
    variables = {k: v for k, v in given.items() if not k.startswith(OF_SLURM) or k in KEPT}
    command = [SBATCH, "--parsable", str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables)
    if answer.returncode != 0:
        rule = " ".join(answer.stderr.split()) or f"{SBATCH} ended with {answer.returncode}"
        raise ConfigError.of("runner submit", rule, "Correct submit.*; sinfo lists partitions.")
    job_id = answer.stdout.strip().partition(";")[0]
    write_json(folder / sessions.SUBMITTED, {"job": job_id})
    return Submitted(job_id, run_dir)


# -- in the job ----------------------------------------------------------------------------
#
# Rank 0 locks the run and trains it to its end; the others join it. A run that was stopped ends
# with 0, and rank 0 says so in a file: srun would take any other code of one process for a failure,
# and end the others. While nothing is trained, stop signals have their default effect.


def main(order: Mapping[str, Any]) -> None:
    """Train the job whose session is `folder` of the order, as one of its processes; exit."""
    try:
        with numerics.sleeping_when_idle():
            code = _train(Path(order["folder"]))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (Exception, SystemExit) as error:  # with SystemExit(0) it would look complete
        code = failures.report(error)
    worker.end_unstopped(code)


def _train(folder: Path) -> int:
    place = processes.adopted()
    if place is not None and place.rank > 0:
        code = launcher.follow(place)
        return DONE if code == STOPPED else code
    run_dir = sessions.run_dir_of(folder)
    before = directory.newest_checkpoint(run_dir)
    code = _lead(folder, run_dir)
    if code != STOPPED:
        return code
    if directory.newest_checkpoint(run_dir) == before and _time_was_up(run_dir):
        print(TOO_SHORT, file=sys.stderr, flush=True)
        return FAILED
    is_over = sessions.summary(run_dir).get("stopped") == TIME_IS_UP  # it is not queued again
    file = outcomes.log_folder(run_dir) / f"slurm-{env.read(JOB_ID)}.stopped"
    file.write_text(TIME_IS_UP if is_over else "")
    return DONE


def _lead(folder: Path, run_dir: Path) -> int:
    """Train the run as rank 0, once no other command holds its lock."""
    job, recipe = Job.load(folder)
    with lock.held(run_dir, LOCK_SECONDS):
        examined = Examined(recipe, [], job.overrides, job.config_name, log_levels=job.log_levels)
        return start_run.continue_in(run_dir, examined, may_change=True)


def _time_was_up(run_dir: Path) -> bool:
    """Return whether the signal before the time limit has stopped the run."""
    return str(sessions.summary(run_dir).get("reason")).startswith(signal.SIGUSR1.name)


# -- the queue -----------------------------------------------------------------------------


def queue() -> dict[str, str]:
    """Return the states of this user's jobs that are queued or run; elements of arrays apart.

    Raises:
        StateError: if Slurm does not answer.
    """
    shown = _ask("squeue", "--me", "--noheader", "--array", "--format=%i %T")
    return dict((line.split()[0], line.split()[1]) for line in shown.splitlines() if line.strip())


def field(name: str) -> str:
    """Return a field of the job that this process runs in, e.g. JobState; StateError: unknown."""
    job_id = env.read(JOB_ID) or ""
    shown = _ask("scontrol", "--oneliner", "show", "job", job_id)
    found = (word.partition("=") for word in shown.split())
    return next((value for key, _, value in found if key == name), "")


def requeue() -> None:
    """Queue the job that this process runs in again; it is ended. StateError: it cannot be."""
    _ask("scontrol", "requeue", env.read(JOB_ID) or "")


def cancel(*job_ids: str, state: str = "") -> None:
    """End jobs, or those of them that are in a state; StateError: Slurm does not answer."""
    if job_ids:
        _ask("scancel", "--quiet", *([f"--state={state}"] if state else []), *job_ids)


def _ask(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise StateError(f"there is no {command[0]} on this machine") from error
    if answer.returncode != 0:
        raise StateError(f"{' '.join(command)}: {' '.join(answer.stderr.split())}")
    return answer.stdout
