"""How a run ends: finished, failed, killed at a system call, out of disk, twice at once."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.resume_matrix import warm
from tests.resume_matrix.cells import RECIPE, reached, tree
from tests.resume_matrix.held import Held, Known, Weights, digest, kept, measured, predicted, runs
from tests.resume_matrix.warm import Answer, Call, run

# What a command that fails may leave in a run, beside its session: what it printed, its lock.
OWN_WORDS = ("logs", "run.log", ".lock", ".", "sessions")
FIRST = "sessions/0001/"  # of the run before
LONGER = "trainer.epochs=3"
LAST = 9  # the step at which a run of `LONGER` ends


class NoSmallDiskError(Exception):
    """This user may mount none."""


class Templates:
    """Working directories with a run that ended cleanly; each use gets a copy.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Path] = {}

    def make(self, kind: str, *starts: tuple[str, ...]) -> None:
        """Make the folder with runs that were started with the recipe and overrides."""
        path = self.made[kind] = self.folder / kind
        path.mkdir()
        for overrides in starts:
            answer = run([*RECIPE, *overrides], path)
            assert answer.code == 0, answer.output
            time.sleep(1.1)  # the next has a later name

    def known(self) -> Known:
        """Return the weights that the templates have, and have once they are resumed."""
        found: dict[str, Weights] = {}
        for kind in ("finished", "stopped"):
            folder = self.copy(kind, f"known-{kind}")
            _learn(folder, found)
            answer = run(resume_line(folder), folder)
            assert answer.code == 0, answer.output
            _learn(folder, found)
        steps = sorted(weights.step for weights in found.values())
        assert steps == [3, 6, 6, 9, 9], steps  # weights at step 6 or 9 differ by the schedule
        return found

    def copy(self, kind: str, name: str) -> Path:
        """Return a copy of a template under another name."""
        return Path(shutil.copytree(self.made[kind], self.folder / name))


def _learn(folder: Path, found: dict[str, Weights]) -> None:
    """Add the weights of the run in `folder`, and what they give."""
    (run_dir,) = runs(folder)
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    told = {row["step"]: row for row in records if row["split"] == "validation"}
    for step, path in kept(run_dir).items():
        name = digest(path / "model.safetensors")
        if name in found:
            continue
        output = folder / "predicted.jsonl"
        use = ["--checkpoint", path.name]
        answer = run(["eval", str(run_dir), *use], folder)
        assert answer.code == 0, answer.output
        metrics = measured(run_dir)["metrics"]
        assert set(metrics) == {"validation", "test"}, answer.output
        for metric, value in metrics["validation"].items():
            assert math.isclose(value, told[step][metric], abs_tol=1e-4), (metrics, told[step])
        answer = run(["predict", str(run_dir), *use, "--output", str(output)], folder)
        assert answer.code == 0, answer.output
        found[name] = Weights(step, metrics, predicted(output))


def failed_resume(folder: Path, *overrides: str) -> str:
    """Resume the run in `folder` with overrides that fail; return what is wrong with that."""
    (run_dir,) = runs(folder)
    before = tree(run_dir)
    answer = run([f"resume={run_dir}", *overrides], folder)
    if answer.code not in (1, 2):
        return f"code {answer.code}: {answer.output[-300:]}"
    after = tree(run_dir)
    changed = [
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
        and (name.split("/")[0] not in OWN_WORDS or name.startswith(FIRST))
    ]
    return f"it changed {sorted(changed)}" if changed else ""


def failed_start(folder: Path, override: str) -> str:
    """Start a run that makes no step; return what is wrong with that.

    What was refused leaves nothing, and what failed a run that is listed as failed.
    """
    answer = run([*RECIPE, override], folder)
    if answer.code == 1 and "failed" in run(["list"], folder).output:
        return ""
    left = sorted(path.name for path in folder.iterdir())
    if answer.code != 2 or left:
        return f"code {answer.code}, {left} left: {answer.output[-300:]}"
    return ""


def start_line() -> list[str]:
    """Return the command of a start."""
    return list(RECIPE)


def resume_line(folder: Path) -> list[str]:
    """Return a command that resumes the run in `folder` with another recipe."""
    (run_dir,) = runs(folder)
    return [f"resume={run_dir}", LONGER]


def trace(line: list[str], folder: Path) -> list[Call]:
    """Return the changing calls of a command in `folder`."""
    answer, found = warm.traced(line, folder)
    assert answer.code == 0, answer.output
    return warm.changing_calls(found, folder)


def ended_by_disk(answer: Answer, folder: Path, before: Held, known: Known) -> str:
    """Return what is wrong with how a command ended that had a full disk.

    The runner exits with 1 if a disk is full and says so; with 0 only if it did all of its work.
    """
    if answer.code == 0:
        return complete(folder, before, known)
    if answer.code not in (1, 2) or "disk is full" not in answer.output:
        return f"code {answer.code}: {answer.output[-300:]}"
    return ""


def complete(folder: Path, before: Held, known: Known) -> str:
    """Return why the run that a command has ended with code 0 is not complete; empty: it is."""
    found = runs(folder)
    if len(found) != 1:
        return f"code 0, and the runs are {found}"
    return reached(found[0], LAST if before.runs else LAST - 3, known)


def two_at_once(folder: Path, line: list[str], known: Known) -> str:
    """Resume the run in `folder` by two commands; return what is wrong with how they end."""
    outputs = [folder.parent / f"{folder.name}.{number}.out" for number in (1, 2)]
    children = [warm.begin(line, folder, output) for output in outputs]
    pairs = zip(children, outputs, strict=True)
    answers = sorted((warm.end(child, output) for child, output in pairs), key=lambda a: a.code)
    first, second = answers
    if first.code != 0:
        return f"codes {first.code}, {second.code}: {first.output[-300:]}"
    told = ("another command", "finished", "changed the run meanwhile")
    # Where both end with 0, either may have found the run finished.
    others = answers if second.code == 0 else [second]
    told_by = [any(words in answer.output for words in told) for answer in others]
    if second.code not in (0, 2) or not any(told_by):
        return f"the second: code {second.code}: {second.output[-300:]}"
    (run_dir,) = runs(folder)
    return reached(run_dir, LAST, known)


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Have a disk of some size at `folder` in the context; what it holds stays afterwards.

    Raises:
        NoSmallDiskError: if this user may mount none.
    """
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    answer = subprocess.run(mount, capture_output=True, text=True, timeout=60)
    if answer.returncode:
        raise NoSmallDiskError(f"no small disk can be mounted: {answer.stderr.strip()}")
    kept = folder.with_name(f"{folder.name}.kept")
    try:
        yield
        shutil.copytree(folder, kept)
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)
    folder.rmdir()
    os.rename(kept, folder)


def out_of_disk_in_a_start(folder: Path, kilobytes: int) -> Answer:
    """Start a run on a disk of some size."""
    folder.mkdir()
    with small_disk(folder, kilobytes):
        return run(start_line(), folder)


def out_of_disk_in_a_resume(folder: Path, free_kilobytes: int) -> Answer:
    """Resume the run in `folder` on a disk with so much room left."""
    source = folder.with_name(f"{folder.name}.source")
    os.rename(folder, source)
    folder.mkdir()
    pages = sum(
        4 if path.is_dir() else -(-path.stat().st_size // 4096) * 4 for path in source.rglob("*")
    )
    with small_disk(folder, pages + free_kilobytes):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        answer = run(resume_line(folder), folder)
    shutil.rmtree(source)
    return answer
