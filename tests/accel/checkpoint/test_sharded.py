"""Sharded checkpoints: each rank writes its shards, and any number of processes reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.checkpoint import directory
from accel.checkpoint.optimizer_state import ParameterNames
from accel.errors import CheckpointError
from tests.accel.strategies.training import BATCH, PLAN, Model, adamw, build, data, steps_of
from tests.helpers import run_distributed

FSDP: dict[str, Any] = {
    "transformer_cls_names_to_wrap": ["Block"],
    "state_dict_type": "SHARDED_STATE_DICT",
}
FILES = {
    *(f"pytorch_model_fsdp_0/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")),
    *(f"optimizer_0/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")),
    *("random_states_0.pkl", "random_states_1.pkl", "sampler.bin"),
}


def started(seed: int = 0, **changed: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = build(fsdp={**FSDP, **changed})
    model = Model(seed=seed)
    loader = DataLoader(data(4), BATCH)
    return accelerator, *accelerator.prepare(model, adamw(model), loader)


def everything(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return full weights and optimizer state."""
    names = ParameterNames([accelerator.unwrap_model(model)])
    saved = accelerator.strategy.state.optimizer_state(optimizer, names)
    state = {
        f"{key}.{name}": value
        for key, entry in saved["state"].items()
        for name, value in entry.items()
    }
    return {**accelerator.get_state_dict(model), **state}


def trained(folder: str, changed: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train, save, and train on; return the state that was saved, and the losses after it."""
    accelerator, model, optimizer, loader = started(**changed)
    steps_of(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    saved = everything(accelerator, model, optimizer)
    losses = steps_of(accelerator, model, optimizer, loader)[0]
    accelerator.end_training()
    return saved, losses


def resumed(folder: str, changed: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Load into a run that starts otherwise; return what it then has, and its losses."""
    accelerator, model, optimizer, loader = started(seed=5, **changed)
    accelerator.load_state(folder)
    found = everything(accelerator, model, optimizer)
    losses = steps_of(accelerator, model, optimizer, loader)[0]
    accelerator.end_training()
    return found, losses


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_rank_writes_its_shards_and_a_run_goes_on_exactly(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    (saved, after), _ = run_distributed(trained, 2, folder, {})
    assert set(directory.verify(folder).files) == FILES
    (found, losses), _ = run_distributed(resumed, 2, folder, {})
    assert_equal(found, saved)
    assert losses == after


def resume(folder: Path, processes: int, **changed: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run_distributed(resumed, processes, str(folder), changed)[0][0]
    return found


def test_one_process_loads_the_shards_of_two_and_the_reverse(tmp_path: Path) -> None:
    (saved, _), _ = run_distributed(trained, 2, str(tmp_path / "two"), {})
    assert_equal(resume(tmp_path / "two", 1), saved)
    ((saved, _),) = run_distributed(trained, 1, str(tmp_path / "one"), {})
    assert_equal(resume(tmp_path / "one", 2), saved)


FULL = {"state_dict_type": "FULL_STATE_DICT"}


@pytest.mark.parametrize(("before", "after"), [({}, FULL), (FULL, {})])
def test_the_other_kind_of_state_dict_is_loaded(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    (saved, _), _ = run_distributed(trained, 2, str(tmp_path), before)
    assert_equal(resume(tmp_path, 2, **after), saved)


def loaded_without_fsdp(folder: str) -> dict[str, torch.Tensor]:
    accelerator, model = build(), Model(seed=5)
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(folder)
    found = everything(accelerator, model, optimizer)
    accelerator.end_training()
    return found


def test_a_run_without_fsdp_loads_shards(tmp_path: Path) -> None:
    (saved, _), _ = run_distributed(trained, 2, str(tmp_path), {})
    for processes in (1, 2):
        assert_equal(run_distributed(loaded_without_fsdp, processes, str(tmp_path))[0], saved)


@pytest.mark.parametrize(
    "changed",
    [
        {"cpu_offload": True},
        {"mixed_precision_policy": "bf16"},
        {"dp_replicate_size": 2},
        {"ignored_modules": "blocks.0"},
    ],
    ids=str,
)
def test_every_setting_of_fsdp_saves_shards(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    (saved, after), _ = run_distributed(trained, 2, folder, changed)
    (found, losses), _ = run_distributed(resumed, 2, folder, changed)
    assert_equal(found, saved)
    assert losses == after
    weights = [value for name, value in saved.items() if value.is_floating_point()]
    assert all(value.dtype == torch.float32 for value in weights)


@pytest.mark.slow
def test_hybrid_shards_and_other_numbers_of_processes(tmp_path: Path) -> None:
    for before, after in [
        ((2, {}), (4, {})),
        ((4, {}), (2, {})),
        ((4, {"dp_replicate_size": 2}), (2, {})),
        ((2, {}), (4, {"dp_replicate_size": 2})),
    ]:
        folder = tmp_path / f"{before}-{after}"
        saved = run_distributed(trained, before[0], str(folder), before[1])[0][0]
        assert_equal(resume(folder, after[0], **after[1]), saved)
