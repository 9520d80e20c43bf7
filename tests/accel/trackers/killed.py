"""A script that is killed after a checkpoint, and goes on from it: what its tracker holds then.

Usage: ``killed.py TRACKER PHASE ORDER``, in the folder of the run. PHASE is "first", which ends by
SIGKILL, "second", "third", which is a second that ends by SIGKILL after its state of step 5, or
"read"; ORDER is "load" (`load_state` before `init_trackers`) or "init".
"""

from __future__ import annotations

import csv
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from accel import Accelerator

ARGUMENTS: dict[str, dict[str, Any]] = {
    "mlflow": {"logging_dir": "store"},
    "dvclive": {"save_dvc_exp": False},
    "trackio": {},
    "wandb": {"mode": "offline"},
}


def main(name: str, phase: str, order: str) -> None:
    """Log steps 0 to 7: the state holds 0 to 2, and the kill comes at once, or after 4."""
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=".")
    is_first = phase == "first"
    if is_first or order == "init":
        accelerator.init_trackers("proj", {"lr": 0.1}, {name: ARGUMENTS[name]})
    if not is_first:
        accelerator.load_state("state")
    if not is_first and order == "load":
        accelerator.init_trackers("proj", {"lr": 0.1}, {name: ARGUMENTS[name]})
    for step in range(0 if is_first else 3, 8):
        accelerator.log({"loss": float(step)}, step=step)
        if not is_first or step < 3:
            accelerator.log({"late": float(step)}, step=step)
        if is_first and step == 2:
            accelerator.save_state("state")
            if order == "init":
                os.kill(os.getpid(), signal.SIGKILL)
        if phase == "third" and step == 5:
            accelerator.save_state("again")
            os.kill(os.getpid(), signal.SIGKILL)
        if is_first and step == 4:
            accelerator.tracker_group.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    accelerator.end_training()


def mlflow_runs() -> list[dict[str, list[int]]]:
    """Return, for each run of the store that is not deleted, the steps of its metrics."""
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///store/mlflow.db")
    experiment = client.get_experiment_by_name("proj")
    assert experiment is not None
    return [
        {
            name: [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        for run in client.search_runs([experiment.experiment_id])
    ]


def trackio_runs() -> list[dict[str, list[int]]]:
    """Return the steps of the values of each run of the database."""
    found: dict[str, dict[str, list[int]]] = {}
    with closing(sqlite3.connect("db/proj.db")) as base:
        for run, step, text in base.execute("select run_name, step, metrics from metrics"):
            for name in json.loads(text):
                found.setdefault(run, {}).setdefault(name, []).append(step)
    return list(found.values())


def dvclive_runs() -> list[dict[str, list[int]]]:
    """Return the steps of the values in the folder."""
    steps = {}
    for path in Path("dvclive/plots/metrics").glob("*.tsv"):
        with path.open(newline="") as file:
            steps[path.stem] = [int(row["step"]) for row in csv.DictReader(file, delimiter="\t")]
    return [steps]


def wandb_runs() -> list[dict[str, list[int]]]:
    """Return the steps of the values of each file, of the run that the state names."""
    from tests.accel.trackers.test_wandb import items, records

    found = []
    for path in sorted(Path("wandb").glob("offline-run-*/run-*.wandb")):
        steps: dict[str, list[int]] = {}
        for record in records(path):
            row = items(record.history.item)
            for name in set(row) & {"loss", "late"}:
                assert row[name] == row["_step"]
                steps.setdefault(name, []).append(row["_step"])
        if steps:  # else a run that was open for a moment
            found.append(steps)
    return found


RUNS: dict[str, Callable[[], list[dict[str, list[int]]]]] = {
    "mlflow": mlflow_runs,
    "trackio": trackio_runs,
    "dvclive": dvclive_runs,
    "wandb": wandb_runs,
}

if __name__ == "__main__":
    if sys.argv[2] == "read":
        print(json.dumps(RUNS[sys.argv[1]]()))
    else:
        main(*sys.argv[1:])
