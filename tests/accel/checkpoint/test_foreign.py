"""E1: directories in the documented layout, and exports that other programs read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import Accelerator
from accel.checkpoint import load
from accel.machine.errors import CheckpointError
from tests.accel.checkpoint.parts import Counter, Run, build, equal
from tests.accel.checkpoint.test_serialization import Evil
from tests.accel.weights.test_load import TiedNet


def random_states(step: int = 3) -> dict[str, Any]:
    return {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


def write(run: Run, folder: Path, ranks: int = 1) -> None:
    """Write the state of `run` as the documentation describes it, without a manifest."""
    folder.mkdir()
    save_file(run.weights(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(run.optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(run.scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"value": np.float64(2.5)}, folder / "custom_checkpoint_0.pkl")
    for rank in range(ranks):
        torch.save(random_states(), folder / f"random_states_{rank}.pkl")


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def test_it_is_loaded_if_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = build()
    run.train()
    write(run, tmp_path / "state")
    saved, rates, drawn = run.everything(), run.scheduler.get_last_lr(), draw()

    fresh = build(seed=4)
    counter = Counter()
    fresh.accelerator.register_for_checkpointing(counter)
    before = fresh.everything()
    with pytest.raises(CheckpointError, match=r"no manifest\.json.*trust_unverified=True"):
        fresh.accelerator.load_state(tmp_path / "state")
    assert equal(fresh.everything(), before)

    fresh.accelerator.load_state(tmp_path / "state", trust_unverified=True)
    assert "could not be verified" in caplog.text
    assert draw() == drawn
    assert equal(fresh.everything(), saved)
    assert fresh.scheduler.get_last_lr() == rates
    assert counter.value == 2.5
    assert fresh.accelerator.step == 3


def test_a_write_that_was_cut_off_is_not_taken_for_one(tmp_path: Path) -> None:
    run = build()
    write(run, tmp_path / "state")
    (tmp_path / "state" / ".partial-1234").mkdir()
    with pytest.raises(CheckpointError, match="cut off"):
        run.accelerator.load_state(tmp_path / "state", trust_unverified=True)
    with pytest.raises(CheckpointError, match="not the documented files"):
        load.describe(tmp_path / "state")


def test_nothing_in_it_is_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = build()
    write(run, tmp_path / "state")
    for name in ("custom_checkpoint_0.pkl", "random_states_0.pkl", "optimizer.bin"):
        run.accelerator.register_for_checkpointing(*([Counter()] if "custom" in name else []))
        torch.save(Evil(), tmp_path / "state" / name)
        with pytest.raises(CheckpointError, match="could run code"):
            run.accelerator.load_state(tmp_path / "state", trust_unverified=True)
    assert "code ran" not in caplog.text


def test_a_tied_weight_that_was_stored_once(tmp_path: Path) -> None:
    engine = Accelerator(cpu=True)
    model = engine.prepare(TiedNet())
    save_file({"embedding.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    torch.save(random_states(), tmp_path / "random_states_0.pkl")
    engine.load_state(tmp_path, trust_unverified=True)
    assert torch.equal(model.head.weight, torch.ones(5, 3))
    engine.prepare(nn.Linear(1, 1))
    save_file({"other": torch.ones(1)}, tmp_path / "model_1.safetensors")
    with pytest.raises(CheckpointError, match="do not fit model 1"):
        engine.load_state(tmp_path, trust_unverified=True)


def test_states_of_devices() -> None:
    states = random_states() | {"torch_cuda_manual_seed": [torch.ones(2), torch.zeros(2)]}
    found = load.random_states(states)["accelerator"]
    assert found["kind"] == "cuda"
    assert any(torch.equal(found["state"], own) for own in states["torch_cuda_manual_seed"])
    single = random_states() | {"torch_xpu_manual_seed": torch.ones(2)}
    assert torch.equal(load.random_states(single)["accelerator"]["state"], torch.ones(2))
