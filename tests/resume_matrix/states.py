"""How a run ends: finished, failed, killed at a system call, out of disk, twice at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.resume_matrix import warm
from tests.resume_matrix.cells import RECIPE, runs, trained, tree
from tests.resume_matrix.warm import Answer, Call, run

# What a command that fails may leave in a run: how it failed, and who had locked it.
OWN_WORDS = ("logs", ".lock", ".")


class Templates:
    """Working directories with a run that ended cleanly; each use gets a copy.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Path] = {}

    def get(self, kind: str, *overrides: str) -> Path:
        """Return the folder with a run that was started with the recipe and `overrides`."""
        if kind not in self.made:
            path = self.folder / kind
            path.mkdir()
            answer = run([*RECIPE, *overrides], path)
            assert answer.code == 0, answer.output
            self.made[kind] = path
        return self.made[kind]

    def copy(self, kind: str, name: str) -> Path:
        """Return a copy of a template under another name."""
        return Path(shutil.copytree(self.made[kind], self.folder / name))


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
        if before.get(name) != after.get(name) and name.split("/")[0] not in OWN_WORDS
    ]
    return f"it changed {sorted(changed)}" if changed else ""


def failed_start(folder: Path, override: str) -> str:
    """Start a run that fails before it has anything to keep; return what is wrong with that."""
    answer = run([*RECIPE, override], folder)
    left = sorted(path.name for path in folder.iterdir())
    if answer.code not in (1, 2) or left:
        return f"code {answer.code}, {left} left: {answer.output[-300:]}"
    return ""


def start_line() -> list[str]:
    """Return the command of a start."""
    return list(RECIPE)


def resume_line(folder: Path) -> list[str]:
    """Return a command that resumes the run in `folder` with another recipe."""
    (run_dir,) = runs(folder)
    return [f"resume={run_dir}", "trainer.epochs=3"]


def trace_start(folder: Path) -> list[Call]:
    """Return the changing calls of a start in `folder`, which is empty."""
    answer, trace = warm.traced(start_line(), folder)
    assert answer.code == 0, answer.output
    return warm.changing_calls(trace, folder)


def trace_resume(folder: Path) -> list[Call]:
    """Return the changing calls of a resume of the run in `folder`."""
    answer, trace = warm.traced(resume_line(folder), folder)
    assert answer.code == 0, answer.output
    return warm.changing_calls(trace, folder)


def two_at_once(folder: Path) -> str:
    """Resume the run in `folder` by two commands; return what is wrong with how they end."""
    line = resume_line(folder)
    outputs = [folder.parent / f"{folder.name}.{number}.out" for number in (1, 2)]
    children = [warm.begin(line, folder, output) for output in outputs]
    pairs = zip(children, outputs, strict=True)
    answers = sorted((warm.end(child, output) for child, output in pairs), key=lambda a: a.code)
    first, second = answers
    if first.code != 0:
        return f"codes {first.code}, {second.code}: {first.output[-300:]}"
    told = ("another command", "finished", "changed the run meanwhile")
    if second.code not in (0, 2) or not any(words in second.output for words in told):
        return f"the second: code {second.code}: {second.output[-300:]}"
    (run_dir,) = runs(folder)
    steps = trained(run_dir)
    return "" if steps == list(range(1, 10)) else f"steps {steps}"


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Have a disk of some size at `folder` in the context; what it holds stays afterwards.

    Raises:
        OSError: if this user may mount none.
    """
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    answer = subprocess.run(mount, capture_output=True, text=True, timeout=60)
    if answer.returncode:
        raise OSError(f"no small disk can be mounted: {answer.stderr.strip()}")
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
