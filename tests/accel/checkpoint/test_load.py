"""The state of a run is loaded, all of it or as it is asked for."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel.machine.errors import CheckpointError, ConfigError, StateError
from tests.accel.checkpoint.test_save import accelerator
from tests.accel.checkpoint.test_session import Counter, names


def test_a_state_is_loaded_from_where_it_is_said(tmp_path: Path) -> None:
    engine = accelerator()
    model = engine.prepare(nn.Linear(2, 2))
    weight = model.weight.detach().clone()
    engine.save_state(str(tmp_path / "first"))
    nn.init.zeros_(model.weight)
    engine.save_state(str(tmp_path / "second"))
    assert engine.load_state(input_dir=str(tmp_path / "first")) == str(tmp_path / "first")
    assert torch.equal(model.weight, weight)


def test_how_files_are_read(tmp_path: Path) -> None:
    engine = accelerator()
    engine.save_state(str(tmp_path))
    engine.load_state(str(tmp_path), {"map_location": torch.device("cpu"), "weights_only": True})
    engine.load_state(str(tmp_path), map_location="on_device")
    with pytest.raises(ConfigError) as caught:
        engine.load_state(
            str(tmp_path), load_kwargs={"weights_only": False, "map_location": "moon", "mmp": 1}
        )
    for part in ("weights_only=False): nothing is read in a way", "'moon'", "mmp=1"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="map_location='cuda:3'"):
        engine.load_state(str(tmp_path), map_location="cuda:3")


def test_weights_may_fit_in_part(tmp_path: Path) -> None:
    engine = accelerator()
    model = engine.prepare(nn.Sequential(nn.Linear(2, 2)))
    weight = model[0].weight.detach().clone()
    engine.save_state(str(tmp_path))
    model.append(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="do not fit model 0"):
        engine.load_state(str(tmp_path))
    nn.init.zeros_(model[0].weight)
    engine.load_state(str(tmp_path), strict=False)
    assert torch.equal(model[0].weight, weight)


def test_every_generator_comes_back(tmp_path: Path) -> None:
    engine = accelerator()
    engine.save_state(str(tmp_path))

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), torch.randn(1).item()]

    expected = draw()
    assert draw() != expected
    engine.load_state(str(tmp_path))
    assert draw() == expected


def test_registered_objects_come_back_and_others_do_not(tmp_path: Path) -> None:
    engine = accelerator()
    counters = Counter(1), Counter(2)
    engine.register_for_checkpointing(*counters)
    engine.save_state(str(tmp_path))
    assert {"custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"} < set(names(tmp_path))
    other = accelerator()
    first = Counter(9)
    other.register_for_checkpointing(first)
    other.load_state(str(tmp_path))
    assert first.value == 1
    for counter in counters:
        counter.value = 0
    engine.load_state(str(tmp_path))
    assert [counter.value for counter in counters] == [1, 2]


def test_registered_objects_in_another_order_are_refused(tmp_path: Path) -> None:
    class Other(Counter):
        """Another class."""

    engine = accelerator()
    engine.register_for_checkpointing(Counter(1), Other(2))
    engine.save_state(tmp_path)
    other = accelerator()
    other.register_for_checkpointing(Other(), Counter())
    with pytest.raises(CheckpointError, match=r"registered as .*Counter, .*Other, and now as"):
        other.load_state(tmp_path)
    renamed = accelerator()  # the names of classes may change
    counters = Counter(), Counter()
    renamed.register_for_checkpointing(*counters)
    renamed.load_state(tmp_path)
    assert [counter.value for counter in counters] == [1, 2]


def test_a_hook_before_loading_takes_models_over(tmp_path: Path) -> None:
    engine = accelerator()
    model = engine.prepare(nn.Linear(2, 2))
    engine.save_state(str(tmp_path))
    seen: list[Any] = []

    def hook(models: list[Any], folder: str) -> None:
        seen.extend([models.pop() is model, folder])

    handle = engine.register_load_state_pre_hook(hook)
    nn.init.zeros_(model.weight)
    engine.load_state(str(tmp_path))
    assert seen == [True, str(tmp_path)]
    assert not model.weight.any()
    handle.remove()
    engine.load_state(str(tmp_path))
    assert model.weight.any()
    assert len(seen) == 2


def test_a_state_is_not_loaded_into_nothing(tmp_path: Path) -> None:
    engine = accelerator()
    model = engine.prepare(nn.Linear(2, 2))
    weight = model.weight.detach().clone()
    engine.save_state(tmp_path)
    engine.free_memory()
    with pytest.raises(StateError, match=r"before prepare .*models: 1.*Call accelerator.prepare"):
        engine.load_state(tmp_path)
    model = engine.prepare(nn.Linear(2, 2))
    engine.load_state(tmp_path)
    assert torch.equal(model.weight, weight)


def test_a_hook_loads_where_nothing_is_prepared(tmp_path: Path) -> None:
    engine = accelerator()
    engine.prepare(nn.Linear(2, 2))
    engine.save_state(tmp_path)
    other = accelerator()
    seen: list[Any] = []
    other.register_load_state_pre_hook(lambda models, folder: seen.append((models, folder)))
    other.load_state(tmp_path)
    assert seen == [([], str(tmp_path))]


def test_what_is_loaded_in_part_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = accelerator()
    engine.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
    engine.register_for_checkpointing(Counter(1))
    engine.save_state(tmp_path)
    other = accelerator()
    other.prepare(nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING):
        other.load_state(tmp_path)
    assert "in part: 1 of 2 models, 0 of 1 registered objects" in caplog.text
    caplog.clear()
    engine.load_state(tmp_path)
    assert not caplog.text
