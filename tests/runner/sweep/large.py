"""A finished sweep of many jobs, made without training."""

from __future__ import annotations

import json
import os
from pathlib import Path

from runner.recipe import hydra_setup, serialization
from runner.sweep import plan
from runner.sweep import sweep as sweeps
from runner.sweep.sweep import Description, Job


def make_large(folder: Path, number: int, *, pending: int = 0) -> list[str]:
    """Make a sweep of `number` jobs, all but the last `pending` finished; return its command line.

    `sweep.json` and the runs are what such a command would have left; `folder` is the working
    directory of the command.
    """
    before = os.getcwd()
    os.chdir(folder)
    try:
        return _make(folder, number, pending)
    finally:
        os.chdir(before)


def _make(folder: Path, number: int, pending: int) -> list[str]:
    given = [f"seed=range({number})", "optimizer.lr=0.1"]
    with hydra_setup.session():
        (examined,) = plan.examine([["seed=0", "optimizer.lr=0.1"]], "config")
        here = sweeps.sources(given)
    base = serialization.frozen_plain(examined.recipe)
    known = [Job((f"seed={seed}", "optimizer.lr=0.1"), {"seed": seed}) for seed in range(number)]
    digest = plan.digest_of("config", given)
    described = Description(["runner"], "config", given, digest, here, 1.0, base, known)
    sweep = sweeps.create(None, examined.recipe, described)
    best = {"metric": "loss", "mode": "min", "step": 7}
    summary = {"complete": True, "stopped": "max_steps", "step": 9, "seconds": 1.5}
    files = {"begun.json": "{}", "job.json": "{}", "config.yaml": serialization.yaml_text(base)}
    for job in range(number - pending):
        session = sweep.run_dir(job) / "sessions" / "0001"
        session.mkdir(parents=True)
        for name, text in files.items():
            (session / name).write_text(text)
        value = {**best, "value": 1 / (job + 1)}
        ended = {"code": 0, "time": 1.0, "summary": {**summary, "best": value}}
        (session / "ended.json").write_text(json.dumps(ended))
    return ["-m", *given]
