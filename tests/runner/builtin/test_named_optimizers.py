"""C1, R1, R2: Muon, schedule-free and 8-bit optimizers by name train as a plain loop does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

from accel.machine.errors import ConfigError, MissingPackageError
from runner.builtin import optimizers
from runner.recipe import composition
from runner.training import build
from tests.accel.precision.float8 import needs_torchao
from tests.helpers import run_distributed
from tests.runner import loops, plain_loops

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": partial(optimizers.muon, lr=0.01, adamw_lr=0.02),
    "schedule_free": partial(optimizers.schedule_free, lr=0.02, warmup_steps=3),
    "adamw_8bit": partial(optimizers.adamw, lr=0.02, state_format="8bit"),
}


def muon_by_hand(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    first, head = model[0], model[3]
    others = [{"params": [first.bias, head.bias], "weight_decay": 0.0}]
    rest = [{"params": [head.weight], "weight_decay": 0.1}, *others]
    hidden = torch.optim.Muon([first.weight], lr=0.01, adjust_lr_fn="match_rms_adamw")
    return [hidden, torch.optim.AdamW(rest, 0.02, (0.9, 0.95))]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one", "ddp", "fsdp", "tp"])
def test_muon_trains_as_a_plain_loop(strategy: str, tmp_path: Path) -> None:
    # It iterates in bf16; where weights are sharded, its sums are rounded otherwise.
    atol = 2e-3 if strategy in ("fsdp", "tp") else 1e-6
    expected, given = plain_loops.plain(muon_by_hand), {"make_optimizer": OPTIMIZERS["muon"]}
    plain_loops.check_weights(expected, tmp_path, strategy, atol, **given)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one", "ddp", "fsdp", "tp"])
def test_the_schedule_free_average_is_that_of_a_plain_loop(strategy: str, tmp_path: Path) -> None:
    made = []

    def by_hand(model: nn.Sequential) -> list[Any]:
        weights, biases = ([getattr(model[i], n) for i in (0, 3)] for n in ("weight", "bias"))
        groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases}]
        made.append(schedulefree.AdamWScheduleFree(groups, lr=0.02, warmup_steps=3))
        made[0].train()
        return made

    plain_loops.plain(by_hand)
    made[0].eval()
    names = ("0.weight", "3.weight", "0.bias", "3.bias")
    tensors = (p.detach() for group in made[0].param_groups for p in group["params"])
    expected = dict(zip(names, tensors, strict=True))
    given = {"make_optimizer": OPTIMIZERS["schedule_free"]}
    plain_loops.check_weights(expected, tmp_path, strategy, **given)


def refused(folder: str, make: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plain_loops.train(folder, "zero2", {"make_optimizer": make})
    loops.forget()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_does_not_have_them(name: str, tmp_path: Path) -> None:
    for text in run_distributed(refused, 2, str(tmp_path), OPTIMIZERS[name]):
        assert "under ZeRO" in text or "under DeepSpeed" in text or "the engine steps" in text


@pytest.mark.slow
@needs_torchao
def test_8_bit_moments_go_on_as_if_a_run_had_not_been_killed(tmp_path: Path) -> None:
    given = {"make_optimizer": OPTIMIZERS["adamw_8bit"], "width": 1024}  # smaller ones stay fp32
    plain_loops.check_weights({}, tmp_path, "ddp", **given)


def test_evaluations_and_saves_have_averaged_weights_and_change_no_training(
    tmp_path: Path,
) -> None:
    recipe = partial(loops.recipe_of, trainer__epochs=2)
    made = {"make_optimizer": OPTIMIZERS["schedule_free"], "make_scheduler": None}
    seldom = loops.build(tmp_path / "seldom", recipe(), **made)
    often = recipe(trainer__eval_every=1, checkpoint__every_steps=2)
    summary = loops.run(tmp_path / "often", often, **made)
    assert seldom.run()["stopped"] == summary["stopped"] == "epochs"
    assert loops.losses(tmp_path / "often") == loops.losses(tmp_path / "seldom")
    saved = loops.weights(tmp_path / "seldom")
    model = seldom.accelerator.unwrap_model(seldom.step.models["model"])
    assert not torch.equal(saved["0.weight"], model[0].weight)  # that of training
    model.load_state_dict(saved)
    validation = loops.Points(loops.NUM_VALIDATION)
    loss = (model(validation.x).squeeze(-1) - validation.y).square().mean().item()
    assert loops.records(tmp_path / "seldom", "validation")[-1]["loss"] == pytest.approx(loss)


def test_what_muon_does_not_train_is_named_or_the_embeddings_and_the_last_layer() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    for patterns, names in (
        (None, ["1.weight", "2.weight"]),
        (["[01].*"], ["2.weight", "3.weight"]),
    ):
        hidden = optimizers.muon(model, adamw=patterns).param_groups[0]["params"]
        assert [n for n, p in model.named_parameters() if any(p is one for one in hidden)] == names
    with pytest.raises(ConfigError, match="optimizer=muon with Sequential: it has no matrices"):
        optimizers.muon(model[3:])


@pytest.mark.usefixtures("hydra_session")
def test_a_schedule_beside_it_and_a_missing_package_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"scheduler with optimizer.name=schedule_free: it aver"):
        build.check_steps([composition.new_run(["optimizer=schedule_free"], "config")])
    monkeypatch.setattr("accel.machine.imports.is_available", lambda package: False)
    with pytest.raises(MissingPackageError, match="pip install schedulefree"):
        optimizers.schedule_free(nn.Linear(1, 1))
