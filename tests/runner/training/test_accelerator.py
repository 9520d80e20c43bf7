"""Every node that a recipe shares with the engine reaches it (C2)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from accel.accelerator import Accelerator
from accel.config.training import ProjectConfiguration
from runner.recipe.schema import (
    Checkpoint,
    Distributed,
    Recipe,
    Tracker,
)
from runner.training.build import make_accelerator, running
from tests.helpers import run_distributed


@dataclass(frozen=True)
class Plan:
    """What `make_accelerator` needs of the batch arithmetic."""

    micro_batch: int = 2
    accumulation: int = 3
    global_batch: int = 6


def test_a_project_folder_of_its_own_is_kept(tmp_path: Path) -> None:
    asked = Recipe(
        distributed=Distributed(device="cpu"),
        checkpoint=Checkpoint(project=ProjectConfiguration(project_dir=str(tmp_path / "states"))),
        tracker=Tracker(log_with=[]),
    )
    accelerator = make_accelerator(asked, tmp_path, Plan())  # type: ignore[arg-type]
    assert accelerator.project_dir == str(tmp_path / "states")


ALONE = Recipe(distributed=Distributed(device="cpu"), tracker=Tracker(log_with=[]))


class Tape:
    """A tracker that knows whether it was closed."""

    finished = failed = False

    def finish(self) -> None:
        self.finished = True


def fail(folder: Path, tape: Tape) -> Accelerator:
    """Return the engine after an error in its context."""
    accelerator = None
    with contextlib.suppress(ValueError):
        with running(ALONE, folder, Plan()) as accelerator:  # type: ignore[arg-type]
            accelerator.tracker_group.trackers = [tape]  # type: ignore[list-item]
            raise ValueError
    assert accelerator is not None
    return accelerator


def fail_in_group(folder: str) -> tuple[bool, bool]:
    """Return (tracker closed, process group still there)."""
    import torch.distributed as dist

    tape = Tape()
    fail(Path(folder), tape)
    return tape.finished and tape.failed, dist.is_initialized()


def test_after_an_error_trackers_are_closed_and_nobody_is_waited_for(tmp_path: Path) -> None:
    assert run_distributed(fail_in_group, 2, str(tmp_path)) == [(True, True)] * 2
