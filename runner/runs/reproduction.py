"""Compare a run's record of code, versions and data with this process. Free of torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import AccelError
from runner.runs import directory, environment, json_files, provenance, sessions
from runner.runs.json_files import Fields

WEIGHTS = ("model", "pytorch_model")


def compare(run_dir: Path, then: Fields, now: Fields) -> dict[str, list[str]]:
    """Return by subject how a run's record differs from this process; no sentence: it does not.

    Args:
        run_dir: the run.
        then: content of its environment.json; empty where it is missing or damaged.
        now: `environment.describe` of this process.
    """
    if not then:
        return {"code": [_unrecorded()]}
    found = environment.differences(then, now)
    found["versions"] += environment.machine_differences(then, now)
    found["recipe"] = []
    if earlier := sessions.earlier_recipes(run_dir):
        names = ", ".join(path.name for path in earlier)
        found["recipe"].append(f"sessions {names} had another recipe")
    if earlier := sessions.earlier_environments(run_dir):
        names = ", ".join(path.name for path in earlier)
        found["code"].append(f"sessions {names} had other code, versions or data")
    if then.get("cwd") not in (None, now.get("cwd")):
        found["recipe"].append(f"relative folders were seen from {then['cwd']}")
    return found


def changed_since(run_dir: Path, packages: Iterable[str], data: object = None) -> list[str]:
    """Return how code, versions and data here differ from those a run was trained with last.

    Args:
        run_dir: the run.
        packages: the user's packages.
        data: the recipe's node of the data factory.

    Returns:
        A sentence each.
    """
    then = recorded(run_dir)
    if not then:
        return [_unrecorded()]
    now = {
        "git": provenance.git_state(os.getcwd()),
        "code": provenance.package_digests(packages),
        "packages": environment.versions(),
        "python": platform.python_version(),
        "data": environment.data_files(data),
    }
    return [line for lines in environment.differences(then, now).values() for line in lines]


def recorded(run_dir: Path) -> Fields:
    """Return the content of a run's environment.json; empty where it is missing or damaged."""
    try:
        return json_files.loads(sessions.read(run_dir, environment.FILE) or b"{}")
    except (OSError, ValueError):
        return {}


def _unrecorded() -> str:
    return f"{environment.FILE} is missing or damaged: code, versions and data are not compared"


def weights_verdict(old: Path, new: Path) -> str:
    """Return in words whether the newest checkpoints of two runs hold the same weights, bit by bit.

    Empty where they are not of the same step, or one of them has none.
    """
    try:
        found = [directory.newest_checkpoint(run_dir) for run_dir in (old, new)]
        manifests = [checkpoints.read_manifest(path) for path in found if path is not None]
    except AccelError:
        return ""
    if len(manifests) < 2:
        return ""
    steps = [manifest.metadata.get("step") for manifest in manifests]
    if steps[0] != steps[1]:
        return f"weights: not compared, the runs ended at step {steps[0]} and at step {steps[1]}"
    digests = [_weights(manifest) for manifest in manifests]
    if not digests[0] or digests[0].keys() != digests[1].keys():
        return ""
    verdict = "bit-equal to" if digests[0] == digests[1] else "not"
    return f"weights at step {steps[0]}: {verdict} those of {old.parent.name}/{old.name}"


def _weights(manifest: checkpoints.Manifest) -> dict[str, str]:
    return {
        name: entry.sha256 for name, entry in manifest.files.items() if name.startswith(WEIGHTS)
    }
