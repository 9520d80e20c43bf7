"""Plays an example of the documentation as it stands there; only its import lines may change.

An example is a text and the objects that it assumes. It runs like a script typed at Python's
prompt: what it prints is recorded, and so is the value of each expression on a line of its own.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import io
import os
import re
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers import run_distributed

DOCUMENTED = "accelerate"  # the package that the documentation imports
Names = dict[str, Any]


def nothing() -> Names:
    """Assume no objects."""
    return {}


def no_more(names: Names) -> Any:
    """Look at nothing but what the example shows."""


@dataclass(frozen=True)
class Example:
    """An example of the documentation.

    Args:
        text: the code, importing the documented package.
        assumes: makes the objects that the text uses and does not define, on each process.
        observe: picks, from the names that the text leaves, what is worth comparing.
        sizes: the numbers of processes it runs on.
        nodes: over how many servers the processes are spread, evenly.
    """

    text: str
    assumes: Callable[[], Names] = nothing
    observe: Callable[[Names], Any] = no_more
    sizes: tuple[int, ...] = (1, 2)
    nodes: int = 1


@dataclass
class Shown:
    """What an example showed on one process.

    Args:
        lines: of output, in order.
        observed: what `Example.observe` picked.
        files: names of the files that it wrote into the current directory, sorted.
    """

    lines: list[str] = field(default_factory=list)
    observed: Any = None
    files: list[str] = field(default_factory=list)


def with_package(text: str, package: str) -> str:
    """Return `text` with `package` on its import lines."""
    return re.sub(rf"(?m)^(\s*(?:from|import) ){DOCUMENTED}\b", rf"\g<1>{package}", text)


def execute(source: str, names: Names) -> None:
    """Run a script and print the values of its top-level expressions, as the prompt does."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr):
            value = eval(compile(ast.Expression(node.value), "<example>", "eval"), names)
            if value is not None:
                print(repr(value))
        else:
            exec(compile(ast.Module([node], []), "<example>", "exec"), names)


class _Recorder(io.StringIO):
    """Output that also goes to a file which the processes share, a line at a time.

    Args:
        shared: the file; the order of its lines is that in which processes wrote them.
    """

    def __init__(self, shared: Path) -> None:
        super().__init__()
        self.shared = shared
        self.line = ""

    def write(self, text: str) -> int:
        """Record `text`."""
        *lines, self.line = (self.line + text).split("\n")
        with self.shared.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
        return super().write(text)


def _spread_over(nodes: int) -> None:
    """Make the processes believe that they run on several servers, without accelerators."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    each = size // nodes
    os.environ.update(LOCAL_RANK=str(rank % each), LOCAL_WORLD_SIZE=str(each))
    os.environ["ACCELERATE_USE_CPU"] = "true"


def play(example: Example, package: str, folder: str) -> Shown:
    """Run `example` on this process.

    Args:
        example: the example.
        package: what it imports from.
        folder: where processes work: each in a folder of its own, beside their common output.
    """
    here = Path(folder) / os.environ["RANK"]
    here.mkdir()
    names = example.assumes() | {"__name__": "__main__"}
    source = with_package(textwrap.dedent(example.text), package)
    output = _Recorder(Path(folder) / "output.txt")
    _spread_over(example.nodes)
    with contextlib.chdir(here), contextlib.redirect_stdout(output):
        execute(source, names)
    files = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
    return Shown(output.getvalue().splitlines(), example.observe(names), files)


def play_and_reset(example: Example, package: str, folder: str) -> Shown:
    """Run `example`, and leave no shared state of the documented package behind."""
    try:
        return play(example, package, folder)
    finally:
        if package == DOCUMENTED:
            _reset_documented()


def _reset_documented() -> None:
    import torch.distributed as dist

    state = importlib.import_module(f"{DOCUMENTED}.state")
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


def shown(example: Example, processes: int, package: str = "accel") -> list[Shown]:
    """Return what an example showed, by process."""
    return shown_together(example, processes, package)[0]


def shown_together(
    example: Example, processes: int, package: str = "accel"
) -> tuple[list[Shown], list[str]]:
    """Return what `shown` does, and the lines of all processes in the order they were printed."""
    with tempfile.TemporaryDirectory() as folder:
        answers = run_distributed(play_and_reset, processes, example, package, folder)
        output = Path(folder) / "output.txt"
        return answers, output.read_text().splitlines() if output.exists() else []
