"""Read the code blocks of README and of `docs/`, and play them as a reader would.

A block of Python, YAML or TOML that begins with ``# PATH`` (behind Hydra's ``# @package``) is the
content of that file. Marks may follow a block's language:

- ``cd=FOLDER``: its commands run there.
- ``short``: runs of these commands are cut short after some steps.
- ``slow``: a Python block that is only played with the slow tests.
- ``cluster``: the commands need a cluster; their recipes are checked, and nothing is started.
- ``skip="REASON"``: not played.

Commands in the tables of a document with the comment `RUN_TABLES` are played once each, as a
``short`` block at its end; in continuous integration a fifth of them, another one for each commit.
Where the comment is `COMPOSED_TABLES`, their recipes are checked instead.

The run directories of the texts, ``runs/NAME/20260101-120000-1a2b``, stand for the newest run of
that name. Machines without a GPU start the processes of ``multi_gpu`` on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from accel.machine.imports import is_available
from tests import commands, tiers

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = re.compile(r"runs/(\w+)/20260101-120000-1a2b")
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"(?:# @package _global_\n)?# ([\w./]+\.\w+)\n")
ROW = re.compile(r"^\|.*\|$", re.M)
COMMAND = re.compile(r"`((?:runner|torchrun) [^`]+)`")
SHORT = ("trainer.max_steps=4", "trainer.limit_eval_batches=1")
RUN_TABLES = "<!-- The commands of these tables are run. -->"
COMPOSED_TABLES = "<!-- The commands of this table are composed, not run. -->"
SECONDS = 300.0
MODULES = {"runner": "runner", "accel": "accel.commands", "torchrun": "torch.distributed.run"}
# Commands of `runner` that take no `--cfg job`.
NAMES = "factories new data list show compare report eval predict generate export again lr-find \
batch-size-find"
LOOKING = [[name] for name in NAMES.split()]
LOOKS = ("--cfg", "--help", "--dry-run")  # flags that start nothing
CHECK = """
import json, sys
from runner import cli

refused = [arguments for arguments in json.loads(sys.argv[1]) if cli.main(arguments) != 0]
sys.exit(f"refused: {refused}" if refused else 0)
"""


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        language: e.g. "bash".
        marks: what follows the language, by name; without a value "".
        text: the code.
        line: its place in the document, for messages.
    """

    language: str
    marks: dict[str, str]
    text: str
    line: int

    @property
    def file(self) -> str:
        """The path of the file that this is; empty if it is none."""
        found = FILE.match(self.text)
        return found[1] if found and self.language in ("python", "yaml", "toml") else ""

    def commands(self) -> list[tuple[list[str], list[str]]]:
        """Return each command of a shell or console block, and the lines that it shows as output.

        A console block shows commands after "$ ", and lines of their output.
        """
        if self.language != "console":
            lines = self.text.replace("\\\n", " ").splitlines()
            return [(words, []) for line in lines if (words := shlex.split(line, comments=True))]
        shown = [part.splitlines() for part in re.split(r"^\$ ", self.text, flags=re.M)[1:]]
        return [(shlex.split(line), answers) for line, *answers in shown]


def blocks(document: Path) -> list[Block]:
    """Return the code blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    played = RUN_TABLES in text or COMPOSED_TABLES in text
    rows = "\n".join(ROW.findall(BLOCK.sub("", text))) if played else ""
    table = list(dict.fromkeys(COMMAND.findall(rows)))
    if tiers.MINUTES in os.environ:  # the first makes the run that others look at
        table = table[:1] + table[1 + zlib.crc32(os.environ.get(tiers.ORDER, "").encode()) % 5 :: 5]
    listed = [
        Block(
            found[1],
            {name: value for name, _, value in (m.partition("=") for m in shlex.split(found[2]))},
            found[3],
            text.count("\n", 0, found.start()) + 1,
        )
        for found in BLOCK.finditer(text)
    ]
    marks = {"table": "", "composed" if COMPOSED_TABLES in text else "short": ""}
    return [*listed, Block("bash", marks, "\n".join(table), 0)]


class Reader:
    """Plays a document in a folder of its own.

    Args:
        document: README.md, or a guide.
        folder: where files are written and commands run.
        real: whether commands run as they stand; otherwise recipes are composed and checked only.
    """

    def __init__(self, document: Path, folder: Path, real: bool) -> None:
        self.blocks = [block for block in blocks(document) if "skip" not in block.marks]
        self.folder = folder
        self.real = real

    def failures(self) -> list[str]:
        """Play all blocks and return what went wrong: the line of the block, and the output."""
        for block in self.blocks:
            if block.file:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
        return [
            f"line {block.line}: {wrong}"
            for block in self.blocks
            if not block.file
            for wrong in self._played(block)
        ]

    def _played(self, block: Block) -> Iterator[str]:
        if block.language == "python":
            yield from self._python(block)
        elif block.language not in ("bash", "console"):
            if block.language not in ("text", "diff"):
                yield f"a block of {block.language} that names no file"
        elif self.real and not {"cluster", "composed"} & block.marks.keys():
            yield from self._commands(block)
        elif self.real or "table" not in block.marks:  # to compose each takes a second
            yield from self._checks(block)

    def _python(self, block: Block) -> Iterator[str]:
        compile(block.text, f"block of line {block.line}", "exec")
        if self.real or not ("slow" in block.marks or RUN.search(block.text)):
            yield from self._run("-c", self._with_runs(block.text), cwd=self.folder)

    def _commands(self, block: Block) -> Iterator[str]:
        """Run the commands of a block."""
        for (program, *given), answers in block.commands():
            if program in ("pip", "make") or "examples/" in "".join(given[:1]):
                continue  # `_checks` looks at the one, `tests/examples` runs the other
            arguments = [self._with_runs(argument) for argument in on_this_machine(given)]
            looks = given[:1] in LOOKING or set(LOOKS) & set(given)
            if "short" in block.marks and not looks:
                arguments += SHORT
            if "--processes" in given:  # which counts all batches
                arguments.append("trainer.limit_eval_batches=null")
            module = ["-m", MODULES[program]] if program in MODULES else []
            cwd = self.folder / block.marks.get("cd", "")
            yield from self._run(*module, *arguments, cwd=cwd, answers=answers)

    def _checks(self, block: Block) -> Iterator[str]:
        """Compose the recipes that the commands of a block name."""
        checks, expected = [], []
        for (program, *arguments), answers in block.commands():
            expected += answers
            yield from unknown([program, *arguments])
            if program == "runner" and arguments[:1] not in LOOKING and checkable(arguments):
                checks.append(arguments)
                if not answers and not set(LOOKS) & set(arguments):
                    submits = arguments[:1] == ["submit"]
                    checks[-1] += ["--dry-run"] if submits else ["--cfg=job", "--resolve"]
        if checks:
            arguments = ["-c", CHECK, json.dumps(checks)]
            cwd = self.folder / block.marks.get("cd", "")
            yield from self._run(*arguments, cwd=cwd, answers=expected)

    def _run(self, *arguments: str, cwd: Path, answers: Sequence[str] = ()) -> Iterator[str]:
        path = os.pathsep.join([str(ROOT), str(cwd)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        ended = commands.run(*arguments, cwd=cwd, environment=environment, timeout=SECONDS)
        output = ended.stdout + ended.stderr
        expected = [line.strip() for line in answers if line.strip() not in ("", "…")]
        missing = [line for line in expected if line not in output]
        if missing or (ended.returncode != 0 and not expected):
            ending = f"ended with {ended.returncode}, missing {missing}"
            yield f"{arguments[-8:]} {ending}\n{output[-1500:]}"

    def _with_runs(self, text: str) -> str:
        """Return `text` with directories of real runs; one is trained where there is none."""
        for found in RUN.finditer(text):
            self._require_run(found[1])
        return RUN.sub(lambda found: str(self._runs(found[1])[-1]), text)

    def _runs(self, name: str) -> list[Path]:
        found = self.folder.glob(f"**/runs/{name}/2*/summary.json")
        return sorted((path.parent for path in found), key=lambda path: path.name)

    def _require_run(self, name: str) -> None:
        if not self._runs(name):
            failed = list(self._run("-m", "runner", f"name={name}", *SHORT, cwd=self.folder))
            assert not failed, failed


def checkable(arguments: Sequence[str]) -> bool:
    """Return whether a recipe can be composed with what is installed, without a run."""
    text = " ".join(arguments)
    return not RUN.search(text) and ("=ray" not in text or is_available("ray"))


def on_this_machine(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with CPU processes in place of GPUs, if there are none."""
    if torch.cuda.is_available():
        return list(arguments)
    return [argument.replace("multi_gpu", "multi_cpu") for argument in arguments]


def unknown(command: Sequence[str]) -> list[str]:
    """Return the targets of `make`, or the extras of `pip install`, that this project lacks."""
    program, *arguments = command
    if program == "make":
        known = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        wanted = arguments[:1]
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        known = list(project["optional-dependencies"])
        found = re.findall(r"(?:accel-runner|\.)\[([\w,]+)\]", " ".join(arguments))
        wanted = [extra for names in found for extra in names.split(",")]
    else:
        return []
    return [f"{program} {name}: there is none" for name in wanted if name not in known]
