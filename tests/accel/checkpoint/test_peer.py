"""The public package reads what we write and we read what it writes (where it is installed).

Holds R4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, load_checkpoint_in_model
from tests.accel.checkpoint.parts import Counter, names
from tests.accel.checkpoint.test_save import Net

accelerate = pytest.importorskip("accelerate", reason="the public package is not installed")
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"max_shard_size": 100},
    {"safe_serialization": False},
    {"safe_serialization": False, "max_shard_size": 100},
]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An accelerator of the public package, whose state is forgotten afterwards."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # it sets this for good
    yield accelerate.Accelerator(cpu=True)
    for state in (accelerate.state.AcceleratorState, accelerate.state.PartialState):
        state._reset_state()


@pytest.mark.parametrize("options", LAYOUTS)
def test_exports_are_the_same_to_both(tmp_path: Path, peer: Any, options: dict[str, Any]) -> None:
    model, ours, theirs = Net(), Net(), Net()
    Accelerator(cpu=True).save_model(model, tmp_path / "ours", **options)
    peer.save_model(model, tmp_path / "theirs", **options)
    assert names(tmp_path / "ours") == names(tmp_path / "theirs")
    accelerate.load_checkpoint_in_model(theirs, tmp_path / "ours")
    load_checkpoint_in_model(ours, tmp_path / "theirs", strict=True)
    for fresh in (ours, theirs):
        assert fresh.head.weight is fresh.embedding.weight
        assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("safe", [True, False])
def test_states_have_the_same_files_and_load(tmp_path: Path, peer: Any, safe: bool) -> None:
    def state(engine: Any, value: int) -> tuple[Any, Any, Counter]:
        model, other = Net(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        prepared = engine.prepare(model, other, optimizer, schedule)
        counter = Counter(value)
        engine.register_for_checkpointing(counter)
        return prepared[0], prepared[2], counter

    theirs, _, _ = state(peer, 5)
    peer.save_state(str(tmp_path / "theirs"), safe_serialization=safe)
    drawn = torch.rand(2)
    engine = Accelerator(cpu=True)
    ours, _, counter = state(engine, 0)
    engine.save_state(str(tmp_path / "ours"), safe_serialization=safe)
    assert set(names(tmp_path / "ours")) - set(names(tmp_path / "theirs")) == {"manifest.json"}
    assert set(names(tmp_path / "theirs")) <= set(names(tmp_path / "ours"))
    engine.load_state(str(tmp_path / "theirs"), trust_unverified=True)
    assert torch.equal(torch.rand(2), drawn)
    assert counter.value == 5
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
