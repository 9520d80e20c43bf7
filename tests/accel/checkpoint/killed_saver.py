"""Run by test_kill.py: dies at each step of a save in turn and prints what was found afterwards.

A child is forked for every step; it kills itself (SIGKILL) at its n-th operation on a file of the
project. The operations are heard through Python's audit hook, so none can be forgotten.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from accel.checkpoint import directory
from tests.accel.checkpoint.parts import automatic, build

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def die_at(operation: int, root: str) -> None:
    """Kill this process at the `operation`-th event below `root`."""
    seen = 0

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in EVENTS and any(str(argument).startswith(root) for argument in arguments[:2]):
            seen += 1
            if seen > operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)


def main(root: Path, into: str) -> None:
    """Print one JSON line per step: whether it was killed, what is there, what is newest."""
    run = build(project_config=automatic(root, limit=1) if into == "new" else None)
    target = None if into == "new" else root / "checkpoints" / "checkpoint_0"
    first = run.accelerator.save_state(target, metadata={"state": "old"})
    kept = root.parent / "kept"
    shutil.copytree(root, kept)
    run.train()
    for operation in range(200):
        child = os.fork()
        if child == 0:
            die_at(operation, str(root))
            run.accelerator.save_state(target, metadata={"state": "new"})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        newest = directory.newest_complete(root / "checkpoints")
        repaired = newest is None and directory.repair(first)
        newest = newest or directory.newest_complete(root / "checkpoints")
        state = None if newest is None else directory.verify(newest).metadata["state"]
        print(json.dumps({"killed": killed, "state": state, "repaired": repaired}), flush=True)
        if not killed:
            return
        shutil.rmtree(root)
        shutil.copytree(kept, root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
