"""Runs the scripts of `examples/scripts/` as programs, for accel or for the documented package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import commands
from tests.examples.playing import ROOT, SCRIPTS, last_line
from tests.examples.scripts import Script

PACKAGES = ("accel", "accelerate")
SIZES = (1, 2)
SECONDS = 500.0
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """The metrics of a script, by package and number of processes."""

    script: Script
    metrics: Mapping[tuple[str, int], Metrics]

    def different(self, tolerance: float) -> list[str]:
        """Return the metrics that the packages disagree on, with their values."""
        return [
            f"{self.script.name} on {size}: {name} {ours[name]} and {theirs[name]}"
            for size in SIZES
            for ours, theirs in [[self.metrics[package, size] for package in PACKAGES]]
            for name in ours
            if abs(ours[name] - theirs[name]) > tolerance
        ]


def result(script: Script, folder: Path, small: bool) -> Result:
    """Run a script under both packages, on one process and on two."""
    return Result(
        script,
        {
            (package, size): run(script, package, size, folder / f"{package}-{size}", small)
            for package in PACKAGES
            for size in SIZES
        },
    )


def run(script: Script, package: str, processes: int, folder: Path, small: bool) -> Metrics:
    """Return the metrics of a script.

    Args:
        script: which one.
        package: what the script finds under the name `accel`.
        processes: that torchrun starts; 1: no torchrun.
        folder: where it works; made.
        small: whether it gets the arguments of its small run.

    Raises:
        AssertionError: if it failed.
    """
    folder.mkdir(parents=True)
    path = str(SCRIPTS / f"{script.name}.py")
    command = ["-m", "tests.comparison.aliased", package, path, "--cpu"]
    if processes > 1:
        torchrun = ("--standalone", "--nproc-per-node", str(processes))
        command = ["-m", "torch.distributed.run", *torchrun, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    arguments = script.small if small else ()
    ended = commands.run(*command, *arguments, cwd=folder, environment=environment, timeout=SECONDS)
    assert ended.returncode == 0, f"{ended.args}\n{ended.stdout}\n{ended.stderr}"
    return last_line(ended.stdout)
