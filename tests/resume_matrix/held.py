"""What a run holds, read without the product: which steps, which weights, what they give."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "tiny"
STEPS_PER_EPOCH = 3
SAMPLES = 128  # of one batch that measures, to which `RECIPE` limits each split
# A rename that the kernel has carried out; one at which the command was killed has no result.
COMMITTED = re.compile(
    rf'rename\w*\(.*/runs/{NAME}/([^/"]+)/checkpoints/checkpoint_(\d+)"(?:, \w+)?\) += 0'
)
Metrics = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Weights:
    """What is known of the weights of one checkpoint from a run that nothing disturbed.

    Attributes:
        step: at which they were kept.
        metrics: what ``eval`` says of them, by split.
        predictions: what ``predict`` writes for them.
    """

    step: int
    metrics: Metrics
    predictions: list[Any]


# By the digest of the file of weights.
Known = Mapping[str, Weights]


@dataclass(frozen=True)
class Held:
    """What a folder held before a command was killed or failed, and must hold afterwards.

    Attributes:
        runs: the least step that each run directory must hold; 0: none.
        best: the runs that say which state is their best.
        more: how many runs may have come besides.
    """

    runs: Mapping[str, int]
    best: frozenset[str] = frozenset()
    more: int = 0

    def plus(self, trace: str) -> Held:
        """Return it with what the command committed according to its trace."""
        steps = dict(self.runs)
        for name, number in COMMITTED.findall(trace):
            steps[name] = max(steps.get(name, 0), (int(number) + 1) * STEPS_PER_EPOCH)
        return Held(steps, self.best, self.more - len(steps.keys() - self.runs.keys()))


def runs(folder: Path) -> list[Path]:
    """Return the run directories below a working directory, oldest first."""
    found = [path for path in folder.glob(f"runs/{NAME}/*") if not path.name.startswith(".")]
    return sorted(found)


def kept(run_dir: Path) -> dict[int, Path]:
    """Return a run's checkpoints by step: those whose files are as their manifest says."""
    found = {}
    for path in (run_dir / "checkpoints").glob("checkpoint_*"):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except (OSError, ValueError):
            continue
        files = manifest["files"]
        if "model.safetensors" in files and all(
            (path / name).exists() and digest(path / name) == entry["sha256"]
            for name, entry in files.items()
        ):
            found[int(manifest["metadata"]["step"])] = path
    return dict(sorted(found.items()))


def newest(run_dir: Path) -> int | None:
    """Return the newest step that a run has kept; None: none."""
    return max(kept(run_dir), default=None)


def says_best(run_dir: Path) -> bool:
    """Return whether the newest checkpoint of a run says which state is the best."""
    newest_path = next(reversed(kept(run_dir).values()), None)
    if newest_path is None:
        return False
    manifest = json.loads((newest_path / "manifest.json").read_text())
    return bool(manifest["metadata"].get("best"))


def chosen(run_dir: Path) -> Path:
    """Return the checkpoint that a run is used by: of those kept, the one of the least loss.

    A state is measured after it is kept: where none has been measured, it is the newest.
    """
    losses: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True):
        record = json.loads(line) if line.endswith("\n") else {}
        if record.get("split") == "validation":
            losses[record["step"]] = record["loss"]
    found = kept(run_dir)
    return found[min(found, key=lambda step: (losses.get(step, math.inf), -step))]


def digest(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def held(folder: Path) -> Held:
    """Record what a folder holds."""
    found = runs(folder)
    best = [run_dir.name for run_dir in found if says_best(run_dir)]
    return Held({run_dir.name: newest(run_dir) or 0 for run_dir in found}, frozenset(best))


def lost(folder: Path, before: Held, known: Known) -> str:
    """Return what a folder lacks of what it held, or holds too much; empty: nothing."""
    found = {run_dir.name: run_dir for run_dir in runs(folder)}
    gone, come = before.runs.keys() - found.keys(), found.keys() - before.runs.keys()
    if gone or len(come) > before.more:
        return f"runs gone: {sorted(gone)}; runs come: {sorted(come)}"
    for name, run_dir in found.items():
        if (newest(run_dir) or 0) < before.runs.get(name, 0):
            return f"{name} holds step {newest(run_dir)}, it held {before.runs[name]}"
        if name in before.best and not says_best(run_dir):
            return f"{name} no longer says which state is its best"
        wrong = strange(run_dir, known)
        if wrong:
            return wrong
    return ""


def strange(run_dir: Path, known: Known) -> str:
    """Return which checkpoint has weights that a run without disturbance never had."""
    for step, path in kept(run_dir).items():
        weights = known.get(digest(path / "model.safetensors"))
        if weights is None or weights.step != step:
            return f"{path} (step {step}) holds other weights than a run without disturbance"
    return ""


def measured(run_dir: Path) -> dict[str, Any]:
    """Return what ``eval`` has measured last: `step`, and `metrics` by split."""
    found: list[dict[str, Any]] = json.loads((run_dir / "eval.json").read_text())["evaluations"]
    return found[-1]


def predicted(path: Path) -> list[Any]:
    """Return what ``predict`` has written; each line must be one sample's."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(SAMPLES)), f"{len(lines)} lines"
    for line in lines:
        assert line["prediction"] == line["probabilities"].index(max(line["probabilities"])), line
    return lines
