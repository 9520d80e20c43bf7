"""Generators: seeded, equal over ranks, saved and restored (R1)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel.comm import rng
from accel.machine.errors import CheckpointError, ConfigError, MissingPackageError
from accel.state import PartialState
from tests.helpers import run_distributed


def draw() -> tuple[Any, ...]:
    """Draw from every generator."""
    numpy = np.random.rand(), np.random.standard_normal()
    return random.random(), random.gauss(0, 1), *numpy, *torch.rand(3).tolist()


def test_one_seed_seeds_all() -> None:
    rng.set_seed(3)
    first = draw()
    rng.set_seed(3)
    assert draw() == first
    rng.set_seed(4)
    assert not set(draw()) & set(first)
    rng.set_seed(2**32 + 1)  # NumPy takes 32 bits


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rng.set_seed(0, deterministic=True)
    assert chosen == [True]


def seeded(device_specific: bool) -> tuple[Any, ...]:
    state = PartialState(cpu=True)
    rng.set_seed(1, device_specific=device_specific)
    values = draw()
    state.destroy_process_group()
    return values


def test_device_specific_seeds_differ() -> None:
    assert len(set(run_distributed(seeded, 2, False))) == 1
    assert len(set(run_distributed(seeded, 2, True))) == 2


def synchronized() -> tuple[list[float], list[float], bool]:
    state = PartialState(cpu=True)
    rank = state.process_index
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    rng.synchronize_rng_states(["torch", "generator"], generator)
    both = [*torch.rand(2).tolist(), *torch.rand(2, generator=generator).tolist()]
    torch.manual_seed(200 + rank)
    generator.manual_seed(rank)
    rng.synchronize_rng_state("generator", generator)
    alone = torch.rand(1, generator=generator).tolist()
    torch_differs = len(set(state.comm.all_gather_object(torch.rand(1).item()))) > 1
    rng.synchronize_rng_state()
    alone += torch.rand(1).tolist()
    state.destroy_process_group()
    return both, alone, torch_differs


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_get_the_states_of_the_main_process(size: int) -> None:
    everywhere = run_distributed(synchronized, size)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(100)
    expected = [*torch.rand(2).tolist(), *torch.rand(2, generator=generator).tolist()]
    assert [both for both, _, _ in everywhere] == [expected] * size
    assert len({tuple(alone) for _, alone, _ in everywhere}) == 1
    assert all(differs == (size > 1) for _, _, differs in everywhere)


class Device:
    """A device's generator whose state is `state`."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def is_available(self) -> bool:
        return True

    def get_rng_state(self) -> Any:
        return self.state

    def set_rng_state(self, state: Any) -> None:
        self.state = state


def synchronized_devices() -> tuple[list[int], int]:
    rank = PartialState(cpu=True).process_index
    cuda, xla = Device(torch.tensor([rank + 7], dtype=torch.uint8)), Device(rank + 2**40)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_available", "get_rng_state", "set_rng_state"):
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        patch.setattr(rng, "require", lambda module, *_, **__: xla)
        rng.synchronize_rng_states(["cuda", "xla"])
    return cuda.state.tolist(), xla.state


@pytest.mark.parametrize("size", [1, 2])
def test_devices_get_the_states_of_the_main_process(size: int) -> None:
    assert run_distributed(synchronized_devices, size) == [([7], 2**40)] * size


def test_what_is_not_there_cannot_be_synchronised() -> None:
    with pytest.raises(ConfigError, match=r"rng_type='tosh'.*torch"):
        rng.synchronize_rng_state("tosh")
    with pytest.raises(MissingPackageError, match="torch_xla"):
        rng.synchronize_rng_state("xla")


def test_capture_and_restore_through_a_file(tmp_path: Path) -> None:
    PartialState(cpu=True)
    rng.set_seed(5)
    random.gauss(0, 1)  # leaves half a pair behind
    np.random.standard_normal()
    torch.save(rng.capture(), tmp_path / "rng.pkl")
    expected = draw()
    rng.restore(torch.load(tmp_path / "rng.pkl", weights_only=True))
    assert draw() == expected


@pytest.mark.parametrize("part", ["python", "numpy", "torch", "accelerator"])
def test_a_missing_part_is_an_error(part: str) -> None:
    state = rng.capture()
    del state[part]
    with pytest.raises(CheckpointError, match=part):
        rng.restore(state)


def test_a_state_of_another_device_is_named() -> None:
    PartialState(cpu=True)
    state = {**rng.capture(), "accelerator": {"kind": "cuda", "state": torch.zeros(16)}}
    with pytest.warns(UserWarning, match="saved on cuda and this run computes on cpu"):
        rng.restore(state)


@pytest.mark.gpu
def test_the_devices_generator_is_captured(tmp_path: Path) -> None:
    PartialState()
    rng.set_seed(7)
    torch.save(rng.capture(), tmp_path / "rng.pkl")
    expected = torch.rand(3, device="cuda").tolist()
    rng.restore(torch.load(tmp_path / "rng.pkl", weights_only=True))
    assert torch.rand(3, device="cuda").tolist() == expected
    with rng.preserved():
        torch.rand(3, device="cuda")


def test_a_seed_is_a_whole_number() -> None:
    wrong: list[Any] = ["1", 1.5, None, True]
    for seed in wrong:
        with pytest.raises(ConfigError, match=r"seed=.*: it is a whole number. Give set_seed"):
            rng.set_seed(seed)
    rng.set_seed(np.int64(3))  # type: ignore[arg-type]
    assert torch.initial_seed() == 3
