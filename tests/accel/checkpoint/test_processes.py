"""States over several processes: other world sizes, one failing rank, one disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel.checkpoint import files
from accel.config.training import ProjectConfiguration
from accel.errors import CheckpointError
from tests.accel.checkpoint.parts import automatic, build, equal
from tests.helpers import run_distributed

KINDS = ("OSError", "ValueError")


class Picky:
    """An object that cannot be saved or loaded on rank 1."""

    def __init__(self, rank: int, at: str) -> None:
        self.broken = at if rank == 1 else ""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.broken == "load":
            raise ValueError("rank 1 cannot load this")

    def hook(self, models: Any, weights: Any, folder: str) -> None:
        if self.broken == "save":
            raise OSError("rank 1 cannot write this")


def train_and_save(
    folder: str,
) -> tuple[list[torch.Tensor], float, list[torch.Tensor], list[float]]:
    run = build()
    torch.manual_seed(run.accelerator.process_index)
    run.train()
    run.accelerator.save_state(folder, metadata={"step": 3})
    saved, draw = run.everything(), torch.rand(1).item()
    run.accelerator.load_state(folder)
    losses = run.train()
    return saved, draw, run.everything(), losses


def load(folder: str, train: bool = False) -> tuple[list[torch.Tensor], Any, list[torch.Tensor]]:
    run = build(seed=8)
    run.accelerator.load_state(folder)
    loaded = run.everything()
    then = run.train() if train else torch.rand(1).item()
    return loaded, then, run.everything()


def fail(folder: str, at: str) -> list[str]:
    run = build()
    picky = Picky(run.accelerator.process_index, at)
    run.accelerator.register_for_checkpointing(picky)
    run.accelerator.register_save_state_pre_hook(picky.hook)
    messages = []
    for call in (run.accelerator.save_state, run.accelerator.load_state):
        try:
            call(folder)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def rotate(folder: str) -> list[str]:
    run = build(project_config=automatic(Path(folder), limit=2))
    paths = [run.accelerator.save_state() for _ in range(3)]
    paths.append(run.accelerator.load_state())
    return [Path(path).name for path in paths]


def save_on_each_node(folder: str) -> str:
    run = build(project_config=ProjectConfiguration(project_dir=folder, save_on_each_node=True))
    # As if each process were on a node of its own.
    object.__setattr__(run.accelerator.plan, "local_rank", 0)
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.save_state(folder)
    return str(caught.value)


def test_two_processes_save_and_both_continue_as_they_would(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    first, second = run_distributed(train_and_save, 2, path)
    assert first[1] != second[1]
    again = run_distributed(load, 2, path, True)
    for before, after in zip((first, second), again, strict=True):
        # Buffers are those of rank 0: DDP gives them to the others at each forward pass.
        assert equal(after[0], first[0])
        assert after[1] == before[3]
        assert equal(after[2], before[2])
    assert {"random_states_0.pkl", "random_states_1.pkl"} < set(files.verify(path).files)
    assert files.read_manifest(path).engine["strategy"] == "ddp"


def test_what_two_processes_saved_loads_on_one(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    saved, draw, _, _ = run_distributed(train_and_save, 2, path)[0]
    loaded, drawn, _ = load(path)
    assert equal(loaded, saved)
    assert drawn == draw


def test_what_one_process_saved_loads_on_two(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    saved, draw, _, _ = train_and_save(path)
    first, second = run_distributed(load, 2, path)
    assert equal(first[0], saved)
    assert equal(second[0], saved)
    assert first[1] == draw
    assert second[1] != draw
    assert run_distributed(load, 2, path)[1][1] == second[1]


@pytest.mark.parametrize("at", ["save", "load"])
def test_one_failing_rank_makes_all_raise(tmp_path: Path, at: str) -> None:
    answers = run_distributed(fail, 2, str(tmp_path / "state"), at, timeout=30)
    for messages in answers:
        assert any(f"failed on 1 of 2 ranks. rank 1: {kind}" in messages[0] for kind in KINDS)
        assert "rank 1 cannot" in messages[0]
    assert (tmp_path / "state").exists() == (at == "load")
    assert [path for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_rotation_and_numbering_agree_over_processes(tmp_path: Path) -> None:
    answers = run_distributed(rotate, 2, str(tmp_path))
    expected = ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_2"]
    assert answers == [expected, expected]
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["checkpoint_1", "checkpoint_2"]


def test_writers_of_several_nodes_notice_that_they_share_a_disk(tmp_path: Path) -> None:
    for message in run_distributed(save_on_each_node, 2, str(tmp_path / "state")):
        assert "save_on_each_node=False" in message
