"""State under Megatron: by the plain model's names, for any strategy and world size (R2, R5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from tests.accel.strategies.megatron.training import (
    CLOSE,
    build_model,
    build_optimizer,
    data,
    started,
    train,
)
from tests.helpers import run_distributed

pytestmark = pytest.mark.slow
ENGINES: dict[str, tuple[str, int, dict[str, Any] | None]] = {
    "one process": ("none", 1, None),
    "fsdp": ("fsdp", 2, None),
    "tp": ("megatron", 2, {"tp_degree": 2}),
    "pp": ("megatron", 2, {"pp_degree": 2}),
    "distributed optimizer": ("megatron", 2, {"use_distributed_optimizer": True}),
    "tp, distributed optimizer": (
        "megatron",
        4,
        {"tp_degree": 2, "use_distributed_optimizer": True},
    ),
}


def runs(
    engine: str,
    fields: dict[str, Any] | None,
    kind: str,
    steps: tuple[int, int],
    source: str | None,
    target: str | None,
    dropout: float,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train `steps` of a run that loads `source` and saves `target`."""
    with started(fields, engine) as accelerator:
        model = build_model(kind, dropout)
        model, optimizer = accelerator.prepare(model, build_optimizer(model))
        if source is not None:
            train(accelerator, model, optimizer, data()[:1])  # neither empty nor the first state
            accelerator.load_state(source)
        losses, _ = train(accelerator, model, optimizer, data()[slice(*steps)])
        if target is not None:
            accelerator.save_state(target)
        state = accelerator.get_state_dict(model)
        return losses, {name: tensor.clone() for name, tensor in state.items()}


def run(
    name: str,
    steps: tuple[int, int],
    source: Path | None = None,
    target: Path | None = None,
    kind: str = "llama",
    dropout: float = 0.0,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, world_size, fields = ENGINES[name]
    places = [None if place is None else str(place) for place in (source, target)]
    return run_distributed(runs, world_size, engine, fields, kind, steps, *places, dropout)[0]


def optimizer_file(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "optimizer.bin", weights_only=True))


def equal_states(one: Path, other: Path) -> bool:
    """Return whether two checkpoints have equal optimizer state, bit for bit."""
    first, second = optimizer_file(one)["state"], optimizer_file(other)["state"]
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key][name])
        for key, values in first.items()
        for name, value in values.items()
    )


@pytest.mark.parametrize("name", ["tp", "pp", "distributed optimizer"])
def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path, name: str) -> None:
    run(name, (0, 2), target=tmp_path / "middle", kind="gpt2", dropout=0.1)
    losses, weights = run(
        name, (2, 4), tmp_path / "middle", tmp_path / "resumed", "gpt2", dropout=0.1
    )
    expected, undisturbed = run(name, (0, 4), target=tmp_path / "end", kind="gpt2", dropout=0.1)
    assert losses == expected[2:]
    assert all(torch.equal(weights[key], value) for key, value in undisturbed.items())
    assert equal_states(tmp_path / "resumed", tmp_path / "end")


@pytest.mark.parametrize("kind", ["tied", "gpt2"])
@pytest.mark.parametrize("name", ["tp", "pp", "tp, distributed optimizer"])
@pytest.mark.parametrize("other", ["one process", "fsdp"])
def test_a_state_leaves_for_another_strategy_and_comes_back(
    tmp_path: Path, name: str, other: str, kind: str
) -> None:
    begun, _ = run(name, (0, 1), target=tmp_path / "first", kind=kind)
    _, kept = run(other, (1, 1), tmp_path / "first", tmp_path / "kept", kind)
    _, back = run(name, (1, 1), tmp_path / "kept", tmp_path / "back", kind)
    assert all(torch.equal(kept[key], value) for key, value in back.items())
    assert equal_states(tmp_path / "first", tmp_path / "back")
    middle, _ = run(other, (1, 2), tmp_path / "first", tmp_path / "second", kind)
    ended, _ = run(name, (2, 4), tmp_path / "second", kind=kind)
    expected, _ = run("one process", (0, 4), kind=kind)
    assert [*begun, *middle, *ended] == pytest.approx(expected, rel=10 * CLOSE)


def test_groups_and_rates_are_saved_by_name(tmp_path: Path) -> None:
    run("tp", (0, 1), target=tmp_path / "tp")
    run("one process", (0, 1), target=tmp_path / "plain")
    ours, plain = (optimizer_file(tmp_path / name)["param_groups"] for name in ("tp", "plain"))
    assert [group["params"] for group in ours] == [group["params"] for group in plain]
    assert [group["lr"] for group in ours] == [1e-2, 5e-3]
