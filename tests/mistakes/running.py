"""Runs command lines, each in a fork of one process that has imported everything.

A start of the interpreter with torch costs seconds, a fork milliseconds. The process that forks
has no threads; each fork runs `runner.cli.main` as the command does.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.mistakes.cases import Answer, Mistake

SECONDS = 240.0


IMPORTED = (
    *("sklearn.datasets", "torch", "torch._dynamo", "torch.utils.tensorboard"),
    *(
        "runner.cli.program",
        "runner.training.build",
        "runner.callbacks.early_stopping",
    ),
    *(
        "runner.recipe.composition",
        "runner.recipe.accelerator_arguments",
        "runner.builtin.bytes_gpt",
        "runner.builtin.digits",
    ),
    *(
        "runner.builtin.gan",
        "runner.builtin.optimizers",
        "runner.builtin.schedules",
        "runner.cli.help",
        "runner.launch.launcher",
    ),
    *("runner.training.loop", "runner.launch.worker"),
)


def prepare() -> None:
    """Import what commands import, and nothing that starts a thread."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at, which would be copied


def answers(mistakes: Iterable[Mistake], num_jobs: int) -> Iterator[tuple[Mistake, Answer]]:
    """Yield each mistake with what the command answers, `num_jobs` at a time."""
    waiting, running = list(mistakes), {}
    while waiting or running:
        while waiting and len(running) < num_jobs:
            mistake = waiting.pop(0)
            folder = Path(tempfile.mkdtemp(prefix="mistake_")).resolve()
            running[_start(mistake, folder)] = (mistake, folder, time.monotonic() + SECONDS)
        for pid, (mistake, folder, deadline) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            elif not ended:
                continue
            del running[pid]
            yield mistake, _answer(folder, os.waitstatus_to_exitcode(status) if ended else None)
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.002)


def _start(mistake: Mistake, folder: Path) -> int:
    here = folder / "here"
    for name, content in mistake.files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    here.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = _run(mistake, folder, here)
        finally:
            os._exit(code)
    return pid


def _run(mistake: Mistake, folder: Path, here: Path) -> int:
    """Be the command."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
    os.chdir(here)
    os.environ.update(mistake.environment)
    from runner import cli

    try:
        code = cli.main(mistake.arguments)
    except SystemExit as end:  # argparse of a subcommand
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def _answer(folder: Path, code: int | None) -> Answer:
    texts = {name: (folder / name).read_text(errors="replace") for name in ("out", "err")}
    here = folder / "here"
    # With the first step a run has begun, and what it wrote is its own.
    left = tuple(
        str(path.relative_to(here))
        for path in here.glob("runs/*/*")
        if not (path / "metrics.jsonl").exists()
    )
    return Answer(code, texts["out"], texts["err"], left, str(here))
