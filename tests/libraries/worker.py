"""One rank of a library's trainings under one engine; started by torchrun.

Each cell runs in a child of its own, forked after the library was imported: fresh state, and the
import is paid once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.libraries import alias

RANK = int(os.environ.get("RANK", "0"))
SECONDS = 90


def prepare(engine: str) -> None:
    """Decide which package answers to the name `accelerate`."""
    if engine == "accel":
        alias.install()
    answering = importlib.import_module("accelerate")
    if answering.__name__ != engine:
        raise RuntimeError(f"{answering.__file__} answers to the name accelerate, not {engine}")


def keep_to_gloo() -> None:
    """Have DeepSpeed compile no collectives of its own, under either engine.

    A process that is killed while it compiles leaves a lock that all later ones wait for, and a
    slow machine compiles for longer than a cell may take; `accel` never compiles them.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train(program: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the numbers of one training."""
    import torch

    torch.set_num_threads(1)
    if "deepspeed" in options:
        keep_to_gloo()
    module = importlib.import_module(f"tests.libraries.programs.{program}")
    return module.run(options, folder)


def child(cell: dict[str, Any], folder: Path) -> None:
    """Run one cell and write its numbers, or its traceback, beside its folder."""
    os.environ["MASTER_PORT"] = str(cell["port"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # a store of this cell's own
    signal.alarm(SECONDS)  # what waits for a rank that has ended would wait for ever
    try:
        answer = {"numbers": train(cell["program"], cell["options"], folder / "files")}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    (folder / f"rank{RANK}.json").write_text(json.dumps(answer))


def main() -> None:
    """Run the cells of a file, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("accel", "accelerate"), required=True)
    parser.add_argument("--cells", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    prepare(given.engine)
    cells = json.loads(given.cells.read_text())
    for program in {cell["program"] for cell in cells}:
        importlib.import_module(f"tests.libraries.programs.{program}")
    for cell in cells:
        folder = given.folder / cell["name"]
        folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            child(cell, folder)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            note = {"error": f"ended with status {status} (a signal after {SECONDS} s: it hung)"}
            (folder / f"rank{RANK}.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main()
