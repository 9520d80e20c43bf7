"""R2, E1: what a run saves comes back, and the next steps are the same."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.machine.errors import CheckpointError, ConfigError, StateError
from tests.accel.checkpoint.parts import Counter, automatic, build, equal, names
from tests.accel.checkpoint.test_save import accelerator
from tests.helpers import reset_accel

# -- restore -------------------------------------------------------------------------------


def test_a_fresh_run_restores_what_the_saved_one_does_next(tmp_path: Path) -> None:
    run = build()
    run.train(epochs=2)
    assert run.accelerator.save_state(tmp_path / "state") == str(tmp_path / "state")
    saved = run.everything()
    expected, after = run.train(), run.everything()

    fresh = build(seed=9)
    fresh.accelerator.load_state(tmp_path / "state")
    assert equal(fresh.everything(), saved)
    assert fresh.scheduler.get_last_lr() == [pytest.approx(1e-2 * 0.7**2)]
    assert fresh.train() == expected
    assert equal(fresh.everything(), after)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_a_state_of_a_gpu_goes_on_there_and_loads_on_the_cpu(
    tmp_path: Path, precision: str
) -> None:
    run = build(cpu=False, mixed_precision=precision)
    run.train(epochs=2)
    run.accelerator.save_state(tmp_path)
    saved, draw = [tensor.cpu() for tensor in run.everything()], torch.rand(3, device="cuda")
    fresh = build(seed=9, cpu=False, mixed_precision=precision)
    fresh.accelerator.load_state(tmp_path)
    assert equal([tensor.cpu() for tensor in fresh.everything()], saved)
    assert torch.equal(torch.rand(3, device="cuda"), draw)
    reset_accel()
    there = build(seed=9)
    with pytest.warns(UserWarning, match="saved on cuda"):
        there.accelerator.load_state(tmp_path)
    assert equal(there.everything(), saved)


@pytest.mark.parametrize("safe", [True, False])
def test_the_files_have_the_documented_names(tmp_path: Path, safe: bool) -> None:
    run = build(mixed_precision="fp16")
    run.accelerator.register_for_checkpointing(Counter())
    run.accelerator.save_state(tmp_path, safe_serialization=safe)
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    assert names(tmp_path) == sorted(
        [
            *("custom_checkpoint_0.pkl", "manifest.json", weights, "optimizer.bin"),
            *("random_states_0.pkl", "sampler.bin", "scaler.pt", "scheduler.bin"),
        ]
    )
    before = run.everything()
    run.train()
    run.accelerator.load_state(tmp_path)
    assert equal(run.everything(), before)


def test_the_scaler_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = build(mixed_precision="fp16")
    run.accelerator.save_state(tmp_path / "lazy")
    run.accelerator.scaler.scale(torch.ones(1))
    run.accelerator.scaler.update(128.0)
    run.accelerator.save_state(tmp_path / "used")
    run.accelerator.load_state(tmp_path / "lazy")
    assert run.accelerator.scaler.get_scale() == 65536.0
    run.accelerator.load_state(tmp_path / "used")
    assert run.accelerator.scaler.get_scale() == 128.0


def test_several_models_optimizers_and_registered_objects(tmp_path: Path) -> None:
    run = build()
    critic = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    critic, optimizer = run.accelerator.prepare(critic, optimizer)
    counters = [Counter(3), Counter({"history": [1.5], "tensor": torch.ones(2)})]
    run.accelerator.register_for_checkpointing(*counters)
    critic(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weight = critic.weight.detach().clone()
    run.accelerator.save_state(tmp_path)
    assert {"model_1.safetensors", "optimizer_1.bin", "custom_checkpoint_1.pkl"} < set(
        names(tmp_path)
    )
    counters[0].value = counters[1].value = None
    nn.init.zeros_(critic.weight)
    optimizer.state.clear()
    run.accelerator.load_state(tmp_path)
    assert counters[0].value == 3
    assert counters[1].value["history"] == [1.5]
    assert torch.equal(critic.weight, weight)
    assert torch.equal(optimizer.state[critic.weight]["momentum_buffer"], torch.ones(2, 2))


def test_a_half_counted_window_is_restored(tmp_path: Path) -> None:
    run = build()
    run.accelerator.step = 3
    run.accelerator.save_state(tmp_path)
    run.accelerator.step = 0
    run.accelerator.load_state(tmp_path)
    assert run.accelerator.step == 3


def test_gradients_of_an_open_window_are_told_to_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path)
    told = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        caplog.clear()
        accelerator.save_state(tmp_path)
        told.append("after 1 of 2 micro-batches of a window" in caplog.text)
    assert told == [True, False]


# -- automatic naming ----------------------------------------------------------------------


def test_the_protected_checkpoint_stays(tmp_path: Path) -> None:
    run = build(project_config=automatic(tmp_path, limit=1))
    best = run.accelerator.save_state()
    for _ in range(3):
        run.accelerator.save_state(protected=[best])
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_3"]


def test_numbering_goes_on_after_a_load(tmp_path: Path) -> None:
    run = build(project_config=automatic(tmp_path))
    for _ in range(3):
        run.accelerator.save_state()
    fresh = build(project_config=automatic(tmp_path))
    with pytest.raises(CheckpointError, match="never overwrites a checkpoint"):
        fresh.accelerator.save_state()
    # Also after a load of an older one: what is there is not overwritten, the new one is newest.
    loaded = fresh.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert Path(loaded).name == "checkpoint_0"
    assert Path(fresh.accelerator.save_state()).name == "checkpoint_3"
    given = build(project_config=automatic(tmp_path, iteration=7))
    assert Path(given.accelerator.save_state()).name == "checkpoint_7"


def test_without_a_directory_the_newest_complete_one_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = build(project_config=automatic(tmp_path))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run.accelerator.load_state()
    paths = [Path(run.accelerator.save_state()) for _ in range(3)]
    content = bytearray((paths[2] / "optimizer.bin").read_bytes())
    content[-100] ^= 4
    (paths[2] / "optimizer.bin").write_bytes(content)
    fresh = build(seed=4, project_config=automatic(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert fresh.accelerator.load_state() == str(paths[1])
    assert "checkpoint_2" in caplog.text
    assert Path(fresh.accelerator.save_state()).name == "checkpoint_3"


def test_no_directory_at_all_is_refused() -> None:
    run = build()
    for call in (run.accelerator.save_state, run.accelerator.load_state):
        with pytest.raises(CheckpointError, match="no directory was given"):
            call()


# -- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest"])
def test_a_broken_checkpoint_is_never_loaded(tmp_path: Path, damage: str) -> None:
    run = build()
    run.accelerator.save_state(tmp_path)
    file = tmp_path / ("manifest.json" if damage == "manifest" else "model.safetensors")
    content = bytearray(file.read_bytes())
    if damage in ("missing", "manifest"):
        file.unlink()
    else:
        file.write_bytes(content[:-1])
    before = run.everything()
    with pytest.raises(CheckpointError, match=file.name):
        run.accelerator.load_state(tmp_path)
    assert equal(run.everything(), before)


def test_a_state_with_less_than_the_run_has_is_refused(tmp_path: Path) -> None:
    run = build()
    run.accelerator.save_state(tmp_path)
    run.accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match="holds only 0 of 1 custom"):
        run.accelerator.load_state(tmp_path)


def test_what_could_not_be_read_back_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    run = build(project_config=automatic(tmp_path))
    run.accelerator.save_state()
    bad = Counter(lambda: None)
    run.accelerator.register_for_checkpointing(bad)
    with pytest.raises(CheckpointError, match=r"registered object 0 \(Counter\)\['value'\]"):
        run.accelerator.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0"]
    bad.value = 1
    assert Path(run.accelerator.save_state()).name == "checkpoint_1"


def test_only_objects_with_a_state_can_be_registered() -> None:
    run = build()
    with pytest.raises(ConfigError) as caught:
        run.accelerator.register_for_checkpointing(Counter(), 3, "x")
    assert len(caught.value.problems) == 2
    assert run.accelerator._custom_objects == []


# -- exports -------------------------------------------------------------------------------


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
