"""How far a run can be made again here: what was compared, and what differs. Free of torch."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import AccelError
from runner.run_dir import (
    atomic_update,
    data_files,
    directory,
    earlier_sessions,
    environment,
    field_types,
    provenance,
    untracked_files,
)
from runner.run_dir.json_files import Fields
from runner.run_dir.provenance import ENVIRONMENT

WEIGHTS = ("model", "pytorch_model")


@dataclass(frozen=True)
class Comparison:
    """What was recorded of a run, held against this process.

    Attributes:
        compared: by subject (code, versions, data, recipe), what was compared, in words.
        differences: by subject, a sentence for each difference.
    """

    compared: dict[str, str]
    differences: dict[str, list[str]]

    @property
    def same(self) -> bool:
        """Whether nothing was found to differ."""
        return not any(self.differences.values())

    def lines(self) -> list[tuple[str, str]]:
        """Return (subject, sentence): of each difference, or of what was found to be equal."""
        found = []
        for subject, compared in self.compared.items():
            sentences = self.differences.get(subject) or [compared]
            found += [(subject, sentence) for sentence in sentences]
        return found


def compare(run_dir: Path, then: Fields, now: Fields) -> Comparison:
    """Compare the recorded environment of a run with that of this process.

    Args:
        run_dir: the run.
        then: content of its environment.json; empty where it is missing or damaged.
        now: `environment.describe` of this process.
    """
    if not then:
        return _unrecorded(run_dir, now)
    differences = {
        "code": provenance.code_differences(then, now),
        "work tree": [],
        "versions": provenance.machine_differences(then, now),
        "data": data_files.differences(then, now),
        "recipe": _recipe_notes(run_dir, then, now),
    }
    for subject, sentences in earlier_sessions.notes(run_dir, then).items():
        differences[subject] += sentences
    compared = {"code": _code_compared(then, now), **_work_tree(now)}
    compared["versions"] = "the same packages, Python, CPU and platform"
    compared["data"] = _data_compared(then)
    compared["recipe"] = "as frozen with the run"
    return Comparison(compared, differences)


def _unrecorded(run_dir: Path, now: Fields) -> Comparison:
    """Return the comparison of a run that has no record of its environment."""
    unknown = f"{ENVIRONMENT} is {_wrong(run_dir)}: versions and code are not compared, nor is data"
    recipe = _recipe_notes(run_dir, {}, now)
    compared = {"code": unknown, **_work_tree(now), "recipe": "as frozen with the run"}
    return Comparison(compared, {"code": [unknown], "recipe": recipe})


def _work_tree(now: Fields) -> dict[str, str]:
    git = now.get("git") or {}
    changes = provenance.uncommitted(git) if "dirty" in git else ""
    if not changes:
        return {}
    changed = f"it has {changes} beside commit {provenance.short_sha(git)}"
    missing = "; ".join(provenance.not_kept(git))
    kept = f"the new run keeps them in {provenance.DIFF}" + (f", but {missing}" if missing else "")
    return {"work tree": f"{changed}: {kept}"}


def changed_since(run_dir: Path, packages: Iterable[str], data: object = None) -> list[str]:
    """Return how code, versions and data here differ from those a run was trained with last.

    Args:
        run_dir: the run.
        packages: the user's packages.
        data: the recipe's node of the data factory.

    Returns:
        A sentence each; one where environment.json is missing or damaged.
    """
    then = recorded(run_dir)
    if not then:
        return [f"{ENVIRONMENT} is {_wrong(run_dir)}: the code of earlier steps is not known"]
    now = {
        "git": provenance.git_state(os.getcwd()),
        "runner_git": provenance.runner_checkout(),
        "code": provenance.package_digests(packages),
        "packages": environment.versions() if "packages" in then else {},
        "python": platform.python_version(),
        "data": data_files.find(data),
    }
    return earlier_sessions.differences(then, now)


def recorded(run_dir: Path) -> Fields:
    """Return the content of a run's environment.json; empty where it is missing or damaged."""
    try:
        content = atomic_update.read(run_dir, ENVIRONMENT) or b"{}"
        return field_types.fitted(field_types.loads(content), field_types.ENVIRONMENT)[0]
    except (OSError, ValueError):
        return {}


def _wrong(run_dir: Path) -> str:
    """Return what is wrong with an environment.json that cannot be used."""
    with contextlib.suppress(OSError):
        return "missing" if atomic_update.read(run_dir, ENVIRONMENT) is None else "damaged"
    return "damaged"


def _code_compared(then: Fields, now: Fields) -> str:
    parts, rest = [], ""
    git, before = now.get("git") or {}, then.get("git") or {}
    reason = git.get("reason") or before.get("reason") or "the run has recorded no git state"
    if "dirty" in git and "dirty" in before:
        parts.append(f"commit {provenance.short_sha(git)}, {_changes_compared(before, git)}")
    else:
        rest = f"; other files are not compared: {reason}"
    packages = [name for name, digest in (now.get("code") or {}).items() if digest]
    known = [name for name in packages if (then.get("code") or {}).get(name)]
    if known:
        parts.append(f"the Python files of {', '.join(known)}")
    if parts:
        return f"the same: {', '.join(parts)}{rest}"
    return f"not compared: {reason}, and no package of the project is recorded"


def _changes_compared(before: Fields, git: Fields) -> str:
    """Return in words which uncommitted changes of two git states were found to be equal."""
    untracked = untracked_files.described(git)
    if untracked and not (before.get("untracked_sha256") and git.get("untracked_sha256")):
        known = "untracked_sha256" in before
        reason = "they are too many or too large" if known else "the run has recorded none"
        tracked = "the same uncommitted changes" if git["dirty"] else "no uncommitted changes"
        return f"{tracked} of tracked files ({untracked}, not compared: {reason})"
    changes = provenance.uncommitted(git)
    return f"the same {changes}" if changes else "no uncommitted changes"


def _data_compared(then: Fields) -> str:
    files = then.get("data") or {}
    if not files:
        return "not compared: the recipe gives the data factory no file or folder"
    return f"the same sizes and times of {', '.join(files)} (contents are not read)"


def _recipe_notes(run_dir: Path, then: Fields, now: Fields) -> list[str]:
    notes = []
    earlier = atomic_update.kept_recipes(run_dir)
    if earlier:
        names = ", ".join(path.name for path in earlier)
        notes.append(
            f"the run began with another recipe ({names}) and was resumed with this one: "
            "its weights come from both"
        )
    if then.get("cwd") not in (None, now.get("cwd")):
        notes.append(f"the run was started in {then['cwd']}: relative folders are seen from here")
    return notes


def weights_verdict(old: Path, new: Path) -> str:
    """Return in words whether the newest checkpoints of two runs hold the same weights, bit by bit.

    Empty where they are not of the same step, or one of them has none.
    """
    try:
        found = [directory.newest_checkpoint(run_dir) for run_dir in (old, new)]
        if None in found:
            return ""
        manifests = [checkpoints.read_manifest(path) for path in found if path is not None]
    except AccelError:
        return ""
    steps = [manifest.metadata.get("step") for manifest in manifests]
    if steps[0] != steps[1]:
        return f"weights: not compared, the runs ended at step {steps[0]} and at step {steps[1]}"
    digests = [_weights(manifest) for manifest in manifests]
    if not digests[0] or digests[0].keys() != digests[1].keys():
        return ""
    verdict = "bit-equal to" if digests[0] == digests[1] else "not"
    return f"weights at step {steps[0]}: {verdict} those of {_named(old)}"


def _named(run_dir: Path) -> str:
    return f"{run_dir.parent.name}/{run_dir.name}"


def _weights(manifest: checkpoints.Manifest) -> dict[str, str]:
    return {
        name: entry.sha256 for name, entry in manifest.files.items() if name.startswith(WEIGHTS)
    }
