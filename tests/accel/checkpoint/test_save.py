"""E1, R5: the documented ways of saving, under the names of the user's own model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel import Accelerator, ProjectConfiguration, load_checkpoint_in_model
from accel.checkpoint import directory
from accel.machine.errors import CheckpointError, ConfigError
from accel.state import AcceleratorState
from accel.utils import save
from tests.accel.checkpoint.parts import Counter, automatic, build, equal, names
from tests.helpers import run_distributed


class Net(nn.Module):
    """A model with a tied weight, a buffer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def accelerator(**kwargs: Any) -> Accelerator:
    return Accelerator(cpu=True, **kwargs)


# -- single objects ------------------------------------------------------------------------


def test_an_object_is_saved(tmp_path: Path) -> None:
    accelerator().save({"a": [1, 2]}, tmp_path / "x.bin")
    assert torch.load(tmp_path / "x.bin", weights_only=True) == {"a": [1, 2]}
    with io.BytesIO() as buffer:
        accelerator().save(torch.ones(2), buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), torch.ones(2))


def test_an_object_is_saved_as_safetensors(tmp_path: Path) -> None:
    accelerator().save({"w": torch.ones(2)}, str(tmp_path / "x"), safe_serialization=True)
    assert torch.equal(load_file(tmp_path / "x")["w"], torch.ones(2))


def test_the_function_saves_an_object(tmp_path: Path) -> None:
    save({"a": 1}, str(tmp_path / "x.bin"))
    assert torch.load(tmp_path / "x.bin", weights_only=True) == {"a": 1}
    save({"a": 2}, tmp_path / "x.bin")
    assert torch.load(tmp_path / "x.bin", weights_only=True) == {"a": 2}
    assert names(tmp_path) == ["x.bin"]


def test_the_function_saves_safetensors(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "x", safe_serialization=True)
    assert torch.equal(load_file(tmp_path / "x")["w"], torch.ones(2))
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        save({"w": torch.ones(2).to_sparse()}, tmp_path / "y", safe_serialization=True)
    assert names(tmp_path) == ["x"]


# -- models --------------------------------------------------------------------------------


def test_a_model_is_exported(tmp_path: Path) -> None:
    engine, model, fresh = accelerator(), Net(), Net()
    engine.save_model(engine.prepare(model), tmp_path / "new" / "folder")
    assert names(tmp_path / "new" / "folder") == ["model.safetensors"]
    load_checkpoint_in_model(fresh, tmp_path / "new" / "folder", strict=True)
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))


def test_an_export_is_split_into_shards(tmp_path: Path) -> None:
    model = Net()
    accelerator().save_model(model, tmp_path, max_shard_size=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    state = model.state_dict()
    assert index["metadata"]["total_size"] == 6 * 4 * 4 + 4 * 4 * 4 + 8
    assert index["weight_map"].keys() == state.keys() - {"head.weight"}  # tied: in no file
    # safetensors alone reads every shard.
    read = {
        name: value
        for file in tmp_path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    assert state.keys() - read.keys() == {"head.weight"}
    assert all(torch.equal(value, state[name]) for name, value in read.items())
    with pytest.raises(ConfigError, match="max_shard_size"):
        accelerator().save_model(model, tmp_path, max_shard_size="10 parsecs")


def test_an_export_may_be_what_torch_saves(tmp_path: Path) -> None:
    model = Net()
    accelerator().save_model(model, tmp_path, safe_serialization=False)
    assert names(tmp_path) == ["pytorch_model.bin"]
    read = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert read.keys() == model.state_dict().keys()


def test_a_state_dict_has_the_users_own_names() -> None:
    engine, model = accelerator(), nn.Linear(2, 2)
    state = engine.get_state_dict(nn.DataParallel(engine.prepare(model)))
    assert list(state) == ["weight", "bias"]
    assert torch.equal(state["weight"], model.weight)


def test_a_state_dict_may_keep_the_wrappers_names() -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    state = accelerator().get_state_dict(wrapped, unwrap=False)
    assert list(state) == ["module.weight", "module.bias"]


# -- states --------------------------------------------------------------------------------


def test_a_state_is_saved_where_it_is_said(tmp_path: Path) -> None:
    engine = accelerator()
    engine.prepare(nn.Linear(2, 2))
    assert engine.save_state(output_dir=str(tmp_path / "deep" / "state"))
    found = names(tmp_path / "deep" / "state")
    assert found == ["manifest.json", "model.safetensors", "random_states_0.pkl"]


def test_a_state_may_hold_weights_as_torch_saves_them(tmp_path: Path) -> None:
    engine = accelerator()
    model = engine.prepare(nn.Linear(2, 2))
    weight = model.weight.detach().clone()
    engine.save_state(str(tmp_path), safe_serialization=False)
    assert "pytorch_model.bin" in names(tmp_path)
    assert "model.safetensors" not in names(tmp_path)
    nn.init.zeros_(model.weight)
    engine.load_state(str(tmp_path))
    assert torch.equal(model.weight, weight)


def test_arguments_of_no_backend_are_refused(tmp_path: Path) -> None:
    engine = accelerator()
    with pytest.raises(ConfigError, match=r"save_state\(exclude_frozen=…\)"):
        engine.save_state(str(tmp_path / "x"), exclude_frozen=True)
    assert names(tmp_path) == []
    engine.save_state(str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="Did you mean 'strict'"):
        engine.load_state(str(tmp_path / "x"), strct=True)


def test_a_hook_before_saving_takes_weights_over(tmp_path: Path) -> None:
    engine = accelerator()
    model = engine.prepare(nn.Linear(2, 2))
    seen: list[Any] = []

    def hook(models: list[Any], weights: list[Any], folder: str) -> None:
        seen.extend([models[0] is model, list(weights[0]), Path(folder).is_dir()])
        torch.save(weights.pop(), Path(folder) / "own.bin")

    handle = engine.register_save_state_pre_hook(hook)
    engine.save_state(str(tmp_path))
    assert seen == [True, ["weight", "bias"], True]
    assert names(tmp_path) == ["manifest.json", "own.bin", "random_states_0.pkl"]
    handle.remove()
    engine.save_state(str(tmp_path))
    assert names(tmp_path) == ["manifest.json", "model.safetensors", "random_states_0.pkl"]
    assert len(seen) == 3


# -- directories that exist ----------------------------------------------------------------


def test_files_of_the_users_own_neither_harm_nor_count(tmp_path: Path) -> None:
    run = build()
    run.train()
    run.accelerator.save_state(tmp_path)
    saved = run.everything()
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("pytorch_model.bin", "model_extra.bin", "custom_checkpoint_0.pkl", "scaler.pt"):
        torch.save({"not": "ours"}, tmp_path / name)
    run.train()
    run.accelerator.load_state(tmp_path)
    assert equal(run.everything(), saved)
    run.accelerator.save_state(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    run.accelerator.load_state(tmp_path)


def test_another_state_in_the_same_directory_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    engine = accelerator()
    engine.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
    engine.register_for_checkpointing(Counter())
    engine.save_state(str(tmp_path))
    other = accelerator()
    other.prepare(nn.Linear(3, 3))
    other.save_state(str(tmp_path), safe_serialization=False)
    assert names(tmp_path) == ["manifest.json", "pytorch_model.bin", "random_states_0.pkl"]


# -- project -------------------------------------------------------------------------------


def test_the_fields_of_a_project(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), "logs", True, 3, 7, True)
    assert (project.project_dir, project.logging_dir) == (str(tmp_path), "logs")
    assert (project.automatic_checkpoint_naming, project.total_limit) == (True, 3)
    assert (project.iteration, project.save_on_each_node) == (7, True)
    with pytest.raises(ConfigError) as caught:
        ProjectConfiguration(total_limit=0, iteration=-1)
    assert len(caught.value.problems) == 2


def test_the_folders_of_a_project_may_be_set_later() -> None:
    project = ProjectConfiguration()
    assert (project.project_dir, project.logging_dir) == (None, None)
    project.set_directories(Path("one"))
    assert (project.project_dir, project.logging_dir) == ("one", "one")
    project.set_directories(project_dir="two")
    assert (project.project_dir, project.logging_dir) == ("two", "one")


def test_automatic_names(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    engine = accelerator(project_config=project)
    assert engine.save_state(str(tmp_path / "elsewhere")) == str(
        tmp_path / "checkpoints" / "checkpoint_0"
    )
    assert names(tmp_path) == ["checkpoints"]


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    engine = accelerator(project_config=automatic(tmp_path, limit=2))
    for _ in range(4):
        engine.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    assert directory.is_complete(engine.load_state())


def test_the_number_of_the_next_one(tmp_path: Path) -> None:
    engine = accelerator(project_config=automatic(tmp_path, iteration=7))
    assert engine.save_iteration == 7
    assert Path(engine.save_state()).name == "checkpoint_7"
    assert engine.save_iteration == 8
    again = accelerator(project_config=automatic(tmp_path))
    assert again.save_iteration == 0
    again.load_state()
    assert again.save_iteration == 8


NAMES = {"0.weight", "0.bias", "1.0.weight", "1.0.bias"}


def prepared(compiled: bool, plugin: Any = None) -> tuple[Accelerator, nn.Module, Any]:
    AcceleratorState._reset_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    if compiled:
        model[1] = torch.compile(model[1], backend="eager")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


def trained(folder: str, compiled: bool, plugin: Any = None) -> dict[str, torch.Tensor]:
    accelerator, model, optimizer = prepared(compiled, plugin)
    accelerator.backward(model(torch.ones(3, 4)).sum())
    optimizer.step()
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/export")
    wanted = accelerator.get_state_dict(model)
    assert wanted.keys() == NAMES
    accelerator, model, optimizer = prepared(not compiled, plugin)
    accelerator.load_state(f"{folder}/state")
    found = accelerator.get_state_dict(model)
    assert all(torch.equal(found[name], wanted[name]) for name in NAMES)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_names_are_those_without_the_compilation(compiled: bool, tmp_path: Path) -> None:
    trained(str(tmp_path), compiled)
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == NAMES
    _, model, _ = prepared(not compiled)
    load_checkpoint_in_model(model, tmp_path / "export", strict=True)


def sharded(folder: str) -> None:
    from accel import FullyShardedDataParallelPlugin

    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        trained(f"{folder}/{kind}", True, plugin)


def test_names_of_a_sharded_model(tmp_path: Path) -> None:
    run_distributed(sharded, 2, str(tmp_path))


def test_a_model_is_unwrapped_of_all_compilations() -> None:
    """E1: `unwrap_model(keep_torch_compile=False)`."""
    accelerator, model, _ = prepared(compiled=True)
    kept = accelerator.unwrap_model(model)
    assert "_orig_mod" in dict(kept[1].named_children())
    own = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert {name for name, _ in own.named_parameters()} == NAMES
