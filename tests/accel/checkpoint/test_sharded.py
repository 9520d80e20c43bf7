"""R5: sharded states are loaded under any strategy and world size."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.checkpoint import directory, sharded
from accel.checkpoint.optimizer_state import ParameterNames
from accel.machine.errors import CheckpointError
from accel.utils import merge_fsdp_weights
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
    # Clones: of one process, they are the live tensors.
    found = {**accelerator.get_state_dict(model), **state}
    return {name: value.clone() for name, value in found.items()}


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
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


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


@pytest.mark.slow
def test_a_run_without_fsdp_loads_shards(tmp_path: Path) -> None:
    (saved, _), _ = run_distributed(trained, 2, str(tmp_path), {})
    for processes in (1, 2):
        assert_equal(run_distributed(loaded_without_fsdp, processes, str(tmp_path))[0], saved)


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


# -- what does not fit, or is broken -------------------------------------------------------


def refusal(folder: str, width: int, strict: bool = True, trust: bool = False) -> str:
    """Return the error of loading into a model of another hidden size."""
    accelerator = build(fsdp=FSDP)
    model = Model(hidden=width)
    model, _ = accelerator.prepare(model, adamw(model))
    with pytest.raises(CheckpointError) as refused:
        accelerator.load_state(folder, strict=strict, trust_unverified=trust)
    accelerator.end_training()
    return str(refused.value)


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    run_distributed(trained, 2, str(tmp_path), {})
    for words in run_distributed(refusal, 2, str(tmp_path), 24, False):
        assert "size mismatch for blocks.0.up.weight" in words


def damaged(folder: Path, name: str, cut: bool) -> list[str]:
    """Return the errors on each rank after a file is cut or removed; the manifest is, too."""
    run_distributed(trained, 2, str(folder), {})
    file = folder / name
    file.write_bytes(file.read_bytes()[:-100]) if cut else file.unlink()
    errors = run_distributed(refusal, 2, str(folder), 20)
    (folder / directory.MANIFEST).unlink()
    return [*errors, *run_distributed(refusal, 2, str(folder), 20, True, True)]


@pytest.mark.parametrize(("name", "cut"), [("pytorch_model_fsdp_0", True), ("optimizer_0", False)])
def test_a_broken_file_is_refused_by_name(name: str, cut: bool, tmp_path: Path) -> None:
    for words in damaged(tmp_path, f"{name}/__1_0.distcp", cut):
        assert "__1_0.distcp" in words
        assert "bytes, not" in words if cut else "missing" in words


def test_a_member_of_an_enum_is_read_as_python_3_11_2_writes_it() -> None:
    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    pickled = b"cbuiltins\ngetattr\n(" + kind + b"VTORCH_CHANNELS_LAST\ntR."
    assert sharded._Descriptions(io.BytesIO(pickled)).load().name == "TORCH_CHANNELS_LAST"


# -- several models, tensor parallelism ----------------------------------------------------


def two_models(folder: str, hand: bool) -> list[dict[str, torch.Tensor]]:
    """Save two models, the second with the first's optimizer's order reversed; or load them."""
    accelerator = build(fsdp=FSDP)
    first, second = Model(seed=9 if hand else 1), Model(seed=9 if hand else 2, hidden=24)
    both = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    own = torch.optim.SGD(second.parameters(), lr=1e-2, momentum=0.9)
    first, second, both, own = accelerator.prepare(first, second, both, own)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    if hand:
        accelerator.load_state(folder)
    else:
        accelerator.backward(first(tokens).square().sum() + second(tokens).square().sum())
        both.step()
        own.step()
        accelerator.save_state(folder)
    names = ParameterNames([accelerator.unwrap_model(m) for m in (first, second)])
    states = [
        {
            f"{key}.{name}": value.clone()
            for key, entry in accelerator.strategy.state.optimizer_state(o, names)["state"].items()
            for name, value in entry.items()
            if isinstance(value, torch.Tensor)
        }
        for o in (both, own)
    ]
    weights = [
        {k: v.clone() for k, v in accelerator.get_state_dict(m).items()} for m in (first, second)
    ]
    accelerator.end_training()
    return [*weights, *states]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    saved = run_distributed(two_models, 2, str(tmp_path), False)[0]
    found = run_distributed(two_models, 2, str(tmp_path), True)[0]
    for one, other in zip(saved, found, strict=True):
        assert one
        assert_equal(one, other)


def with_tensor_parallelism(folder: str, load: bool) -> dict[str, torch.Tensor]:
    tp = {"tp_size": 2, "tp_plan": PLAN}
    accelerator, model = build(fsdp=FSDP, tp=tp), Model(seed=5 if load else 0)
    loader = DataLoader(data(4), BATCH)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    if load:
        accelerator.load_state(folder)
    else:
        steps_of(accelerator, model, optimizer, loader)
        accelerator.save_state(folder)
    found = everything(accelerator, model, optimizer)
    accelerator.end_training()
    return found


@pytest.mark.slow
def test_shards_of_tensor_parallelism_and_fsdp(tmp_path: Path) -> None:
    saved = run_distributed(with_tensor_parallelism, 4, str(tmp_path), False)[0]
    assert_equal(run_distributed(with_tensor_parallelism, 4, str(tmp_path), True)[0], saved)
    assert_equal(resume(tmp_path, 2), saved)


def test_a_saved_state_is_merged(tmp_path: Path) -> None:
    saved = run_distributed(trained, 2, str(tmp_path / "state"), {})[0][0]
    merge_fsdp_weights(tmp_path / "state", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == Model().state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in merged.items())


def failing(folder: str) -> str:
    """Save once, then fail on rank 1 only while shards are written; return the error."""
    accelerator, *_ = started()
    accelerator.save_state(folder)
    if accelerator.process_index == 1:
        sharded.FileSystemWriter.write_data = _full_disk  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError) as refused:
            accelerator.save_state(f"{folder}_new")
    finally:
        sharded.FileSystemWriter.write_data = WRITE  # type: ignore[method-assign]
        accelerator.end_training()
    return str(refused.value)


WRITE = sharded.FileSystemWriter.write_data


def _full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_on_one_rank_raises_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    for words in run_distributed(failing, 2, str(tmp_path / "state")):
        assert "the disk is full" in words
    assert os.listdir(tmp_path) == ["state"]
    directory.verify(tmp_path / "state")
