"""States over several processes: other world sizes, one failing rank, one disk (R4)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import load_checkpoint_in_model, utils
from accel.checkpoint import directory
from accel.config.handlers import DistributedDataParallelKwargs
from accel.config.training import ProjectConfiguration
from accel.machine.errors import CheckpointError
from tests.accel.checkpoint.parts import Counter, Run, build, equal
from tests.helpers import run_distributed

# DDP then keeps its first buckets; else a fresh wrapper adds up three ranks' gradients in another
# order than one that has made a step.
PINNED = DistributedDataParallelKwargs(find_unused_parameters=True)
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
    run = build(kwargs_handlers=[PINNED])
    torch.manual_seed(run.accelerator.process_index)
    run.train()
    run.accelerator.save_state(folder, metadata={"step": 3})
    saved, draw = run.everything(), torch.rand(1).item()
    run.accelerator.load_state(folder)
    losses = run.train()
    return saved, draw, run.everything(), losses


def load(folder: str, train: bool = False) -> tuple[list[torch.Tensor], Any, list[torch.Tensor]]:
    run = build(seed=8, kwargs_handlers=[PINNED])
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


def register_otherwise(folder: str) -> list[str]:
    """Register one object on rank 1 only, then both, in another order than there."""
    run = build()
    is_first = run.accelerator.process_index == 0
    counter, picky = Counter(), Picky(0, "")
    messages = []
    for objects in ([] if is_first else [counter], [picky, counter] if is_first else [picky]):
        run.accelerator.register_for_checkpointing(*objects)
        with pytest.raises(CheckpointError) as caught:
            run.accelerator.save_state(folder)
        messages.append(str(caught.value))
    return messages


def save_on_each_node(folder: str) -> str:
    run = build(project_config=ProjectConfiguration(project_dir=folder, save_on_each_node=True))
    # As if each process were on a node of its own.
    run.accelerator._change(local_rank=0)
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.save_state(folder)
    return str(caught.value)


def alone_on_a_node(folder: str) -> Path:
    """Enter a folder that only this process has, as if it were the disk of its node."""
    node = Path(folder) / f"node{os.environ['RANK']}"
    node.mkdir()
    os.chdir(node)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return node


def save_on_disks_of_their_own(folder: str) -> dict[str, Any]:
    here, before = os.getcwd(), alone_on_a_node(folder)
    try:
        project = ProjectConfiguration(save_on_each_node=True)
        run = build(project_config=project)
        run.train()
        run.accelerator.save("once a node", before / "saved.bin")
        utils.save("main alone", before / "main.bin")
        utils.save("each node", before / "node.bin", save_on_each_node=True)
        run.accelerator.save_model(run.model, before / "export")
        run.accelerator.save_state("/proc/self/cwd/state")
        saved = run.everything()
        run.train()
        run.accelerator.load_state("/proc/self/cwd/state")
        held = sorted(path.name for path in before.iterdir())
        states = [
            n for n in directory.verify(before / "state").files if n.startswith("random_states")
        ]
        return {"same": equal(run.everything(), saved), "held": held, "states": states}
    finally:
        os.chdir(here)


def exports(folder: str) -> dict[str, Any]:
    """What is asked of the main process alone must not wait for the others."""
    run, path = build(), Path(folder)
    accelerator = run.accelerator
    answer = {
        "own": next(iter(accelerator.get_state_dict(run.model))),
        "wrapped": next(iter(accelerator.get_state_dict(run.model, unwrap=False))),
    }
    if accelerator.is_main_process:
        accelerator.save_model(run.model, path / "main")
    accelerator.save_model(run.model, path / "all", max_shard_size=300)
    accelerator.save(accelerator.process_index, path / "index.bin")
    accelerator.wait_for_everyone()
    fresh = build(seed=4)
    for name in ("main", "all"):
        load_checkpoint_in_model(fresh.model, path / name, strict=True)
        answer[name] = equal(list(fresh.weights().values()), list(run.weights().values()))
    answer["index"] = torch.load(path / "index.bin", weights_only=True)
    return answer


def broadcast(folder: str) -> tuple[bool, list[str]]:
    """Ranks but 0 name a folder that does not exist."""
    run, other = build(seed=0), build(seed=4)
    rank = run.accelerator.process_index
    path = Path(folder) if rank == 0 else Path(folder) / "not here"
    if rank == 0:
        exports_of(run, path)
    meta = torch.nn.Sequential(*run.accelerator.unwrap_model(other.model)).to("meta")
    same = []
    for model in (other.model, meta):
        load_checkpoint_in_model(model, path, strict=True, broadcast_from_rank0=True)
        state = run.accelerator.get_state_dict(model)
        same.append(equal(list(state.values()), list(run.weights().values())))
    messages = []
    for wrong in (path / "nothing", Path(folder) / "cut"):
        try:
            load_checkpoint_in_model(other.model, wrong, broadcast_from_rank0=True)
        except CheckpointError as error:
            messages.append(str(error))
    return all(same), messages


def exports_of(run: Run, path: Path) -> None:
    run.accelerator.save_model(run.model, path, max_shard_size=300)
    (path / "cut").mkdir()
    (path / "cut" / "model.safetensors").write_bytes(b"cut")


def test_processes_save_and_all_continue_as_they_would(tmp_path: Path) -> None:
    path, world_size = str(tmp_path / "state"), 3
    saved = run_distributed(train_and_save, world_size, path)
    assert len({draw for _, draw, _, _ in saved}) == world_size
    again = run_distributed(load, world_size, path, True)
    for before, after in zip(saved, again, strict=True):
        # Buffers are those of rank 0: DDP gives them to the others at each forward pass.
        assert equal(after[0], saved[0][0])
        assert after[1] == before[3]
        assert equal(after[2], before[2])
    held = set(directory.verify(path).files)
    assert {f"random_states_{rank}.pkl" for rank in range(world_size)} < held
    assert directory.read_manifest(path).engine["strategy"] == "ddp"


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_several_processes_saved_loads_on_others(tmp_path: Path, world_size: int) -> None:
    path = str(tmp_path / "state")
    saved, draw, _, _ = run_distributed(train_and_save, world_size, path)[0]
    loaded, drawn, _ = load(path)
    assert equal(loaded, saved)
    assert drawn == draw
    other = 5 - world_size
    for loaded, _, _ in run_distributed(load, other, path):
        assert equal(loaded, saved)


def test_what_one_process_saved_loads_on_several(tmp_path: Path) -> None:
    path, world_size = str(tmp_path / "state"), 3
    saved, draw, _, _ = train_and_save(path)
    answers = run_distributed(load, world_size, path)
    assert all(equal(loaded, saved) for loaded, _, _ in answers)
    draws = [drawn for _, drawn, _ in answers]
    assert draws[0] == draw
    assert len(set(draws)) == world_size
    assert [drawn for _, drawn, _ in run_distributed(load, world_size, path)] == draws


@pytest.mark.parametrize("at", ["save", "load"])
def test_one_failing_rank_makes_all_raise(tmp_path: Path, at: str) -> None:
    for messages in run_distributed(fail, 2, str(tmp_path / "state"), at):
        assert any(f"failed on 1 of 2 ranks. rank 1: {kind}" in messages[0] for kind in KINDS)
        assert "rank 1 cannot" in messages[0]
    assert (tmp_path / "state").exists() == (at == "load")
    assert [path for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_ranks_that_registered_other_objects_are_refused(tmp_path: Path) -> None:
    for only, order in run_distributed(register_otherwise, 2, str(tmp_path / "state")):
        assert "rank 0: custom: none; rank 1: custom: tests.accel.checkpoint" in only
        assert "the same objects in the same order" in order
        assert order.index("Picky") < order.index("Counter") < order.rindex("Picky")
    assert list(tmp_path.iterdir()) == []


def test_writers_of_several_nodes_notice_that_they_share_a_disk(tmp_path: Path) -> None:
    for message in run_distributed(save_on_each_node, 2, str(tmp_path / "state")):
        assert "save_on_each_node=False" in message


def test_each_node_has_a_state_of_its_own(tmp_path: Path) -> None:
    answers = run_distributed(save_on_disks_of_their_own, 2, str(tmp_path))
    for rank, answer in enumerate(answers):
        main = ["main.bin"] if rank == 0 else []
        assert answer["held"] == ["export", *main, "node.bin", "saved.bin", "state"]
        assert answer["states"] == [f"random_states_{rank}.pkl"]
        assert answer["same"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_exports_over_processes(tmp_path: Path, world_size: int) -> None:
    wrapped = "0.weight" if world_size == 1 else "module.0.weight"
    for answer in run_distributed(exports, world_size, str(tmp_path)):
        assert answer == {
            **{"own": "0.weight", "wrapped": wrapped, "main": True, "all": True, "index": 0}
        }


@pytest.mark.parametrize("world_size", [1, 2])
def test_rank_0_reads_weights_for_all(tmp_path: Path, world_size: int) -> None:
    for same, messages in run_distributed(broadcast, world_size, str(tmp_path)):
        assert same
        assert "no such file or folder" in messages[0]
        assert "no complete safetensors file" in messages[1]
