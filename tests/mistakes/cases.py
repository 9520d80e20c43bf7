"""One mistake that a person makes, and what is said to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

REFUSED = 2
FAILED = 1
MAX_LINES = 10


@dataclass(frozen=True)
class Mistake:
    """A command line with one thing wrong.

    Attributes:
        kind: where it was drawn from.
        arguments: of the command line.
        names: texts that the message must contain; of a tuple one at least.
        files: what lies in the working directory, by path.
        environment: variables.
        code: the exit code that is right.
        late: whether it shows in training alone, so that the header is on standard output.
    """

    kind: str
    arguments: tuple[str, ...]
    names: tuple[str | tuple[str, ...], ...] = ()
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    code: int = REFUSED
    late: bool = False

    @property
    def line(self) -> str:
        """The command line, for people."""
        return " ".join(["runner", *self.arguments])


@dataclass(frozen=True)
class Answer:
    """What the command did.

    Attributes:
        code: exit code; None where it did not end in time.
        out: standard output.
        err: standard error.
        left: directories of runs that made no step.
        folder: the working directory.
    """

    code: int | None
    out: str
    err: str
    left: tuple[str, ...]
    folder: str


def wrong(mistake: Mistake, answer: Answer) -> list[str]:
    """Return what is wrong with an answer."""
    found = []
    if answer.code != mistake.code:
        found.append(f"exit code {answer.code}, not {mistake.code}")
    lines = answer.err.splitlines() + ([] if mistake.late else answer.out.splitlines())
    if not answer.err.strip():
        found.append("no word on standard error")
    if len(lines) > MAX_LINES:
        found.append(f"{len(lines)} lines")
    frames = re.findall(r'File "([^"]+)", line', answer.err)
    if mistake.code == REFUSED and ("Traceback" in answer.err or frames):
        found.append("a traceback for a refusal")
    inner = [frame for frame in frames if not frame.startswith(answer.folder)]
    if inner:
        found.append(f"inner frames: {inner[0]}")
    for name in mistake.names:
        if not any(one in answer.err for one in ((name,) if isinstance(name, str) else name)):
            found.append(f"the message does not contain {name!r}")
    if answer.left and mistake.code == REFUSED:  # a run that failed is shown
        found.append(f"a run directory is left: {answer.left[0]}")
    return found
