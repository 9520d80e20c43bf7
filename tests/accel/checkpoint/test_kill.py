"""SIGKILL at every file operation of a save: a complete state is always there to resume from."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from accel.checkpoint import directory, sharded
from tests import commands
from tests.accel.checkpoint.test_sharded import assert_equal, resumed, started, trained
from tests.accel.strategies.training import steps_of
from tests.helpers import WorkerError, run_distributed

ROOT = Path(__file__).resolve().parents[3]


def killed_everywhere(tmp_path: Path, into: str) -> list[dict[str, Any]]:
    command = ("-m", "tests.accel.checkpoint.killed_saver", str(tmp_path / "run"), into)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = commands.run(*command, cwd=ROOT, environment=environment)
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
@pytest.mark.parametrize("into", ["new", "existing"])
def test_a_kill_at_any_step_leaves_a_complete_state(tmp_path: Path, into: str) -> None:
    found = killed_everywhere(tmp_path, into)
    assert len(found) > 20
    assert [entry["killed"] for entry in found] == [True] * (len(found) - 1) + [False]
    states = [entry["state"] for entry in found]
    assert set(states) == {"old", "new"}
    # Old until the commit, new from then on: never nothing, never back again.
    assert states == sorted(states, reverse=True)
    assert any(entry["repaired"] for entry in found) == (into == "existing")


# -- several processes ---------------------------------------------------------------------


def killed_in_shards(old: str, new: str, rank: int, step: str) -> None:
    """Save, train on, and save again: there `rank` dies while shards are written."""
    accelerator, model, optimizer, loader = started()
    steps_of(accelerator, model, optimizer, loader)
    accelerator.save_state(old)
    steps_of(accelerator, model, optimizer, loader)
    if accelerator.process_index == rank:
        setattr(
            sharded.FileSystemWriter, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        )
    accelerator.save_state(new)


@pytest.mark.slow
@pytest.mark.parametrize("into", ["new", "old"])
@pytest.mark.parametrize(("rank", "step"), [(0, "write_data"), (1, "write_data"), (0, "finish")])
def test_a_kill_while_shards_are_written_leaves_the_older_state_to_resume_from(
    tmp_path: Path, rank: int, step: str, into: str
) -> None:
    (saved, after), _ = run_distributed(trained, 2, str(tmp_path / "unbroken"), {})
    old, new = str(tmp_path / "run" / "old"), str(tmp_path / "run" / into)
    with pytest.raises(WorkerError, match=rf"rank {rank} died"):
        run_distributed(killed_in_shards, 2, old, new, rank, step)
    directory.verify(old)
    assert not (tmp_path / "run" / "new").exists()
    (found, losses), _ = run_distributed(resumed, 2, old, {})
    assert_equal(found, saved)
    assert losses == after
    # The next save of that name removes what the killed one left.
    (saved, _), _ = run_distributed(trained, 2, new, {})
    assert not any(tmp_path.rglob("*.partial-*"))
    assert_equal(run_distributed(resumed, 2, new, {})[0][0], saved)
