"""What no command may do to a run that it was to resume: the oracles must see each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.resume_matrix.held import digest, runs


def _delete_run(folder: Path) -> None:
    (run_dir,) = runs(folder)
    shutil.rmtree(run_dir)


def _delete_checkpoints(folder: Path) -> None:
    (run_dir,) = runs(folder)
    shutil.rmtree(run_dir / "checkpoints")


def _tear_a_checkpoint(folder: Path) -> None:
    (weights,) = folder.rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])


def _change_weights(folder: Path) -> None:
    """Change one number of the weights, and the digest that the manifest tells of them."""
    (weights,) = folder.rglob("model.safetensors")
    manifest = weights.with_name("manifest.json")
    was = digest(weights)
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\x80\x3f")
    body = manifest.read_text().replace(was, digest(weights))
    assert json.loads(body)["files"]["model.safetensors"]["sha256"] == digest(weights)
    manifest.write_text(body)


def _add_a_run(folder: Path) -> None:
    (run_dir,) = runs(folder)
    shutil.copytree(run_dir, run_dir.with_name(f"{run_dir.name[:-1]}x"))


MUTILATIONS: dict[str, Callable[[Path], None]] = {
    "mutilated: the run is deleted": _delete_run,
    "mutilated: its checkpoints are deleted": _delete_checkpoints,
    "mutilated: a checkpoint is torn": _tear_a_checkpoint,
    "mutilated: other weights": _change_weights,
    "mutilated: a second run": _add_a_run,
}
