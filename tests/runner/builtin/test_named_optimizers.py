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
from tests.runner import loops
from tests.runner.training.test_strategies import ENGINES

STEPS = 12
DEVICES = {"one": 1, "ddp": 2, "fsdp": 2, "tp": 2}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": partial(optimizers.muon, lr=0.01, adamw_lr=0.02),
    "schedule_free": partial(optimizers.schedule_free, lr=0.02, warmup_steps=3),
    "adamw_8bit": partial(optimizers.adamw, lr=0.02, state_format="8bit"),
}


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(4, width), nn.Dropout(0.0), nn.Tanh(), nn.Linear(width, 1)]
    return nn.Sequential(*layers)


def plain(name: str) -> dict[str, torch.Tensor]:
    """Return the weights that a plain loop trains."""
    model, data = net(), loops.Points(loops.NUM_TRAIN)
    first, head = model[0], model[3]
    if name == "muon":
        others = [{"params": [first.bias, head.bias], "weight_decay": 0.0}]
        kinds: list[Any] = [
            torch.optim.Muon([first.weight], lr=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [{"params": [head.weight], "weight_decay": 0.1}, *others], 0.02, (0.9, 0.95)
            ),
        ]
    else:
        groups = [
            {"params": [first.weight, head.weight], "weight_decay": 0.01},
            {"params": [first.bias, head.bias], "weight_decay": 0.0},
        ]
        kinds = [schedulefree.AdamWScheduleFree(groups, lr=0.02, warmup_steps=3)]
        kinds[0].train()
    for _ in range(STEPS):
        (model(data.x).squeeze(-1) - data.y).square().mean().backward()
        for optimizer in kinds:
            optimizer.step()
            optimizer.zero_grad()
    if name == "schedule_free":
        kinds[0].eval()
    return model.state_dict()


def run(folder: Path, name: str, strategy: str = "one", **arguments: Any) -> dict[str, Any]:
    size = {"trainer__global_batch_size": loops.NUM_TRAIN, "trainer__epochs": STEPS}
    recipe = loops.recipe_of(**size, checkpoint__every_steps=3, **ENGINES.get(strategy, {}))
    given = {"make_optimizer": OPTIMIZERS[name], "make_scheduler": None, **arguments}
    return loops.run(folder, recipe, **given)


def trained(folder: str, name: str, strategy: str) -> dict[str, torch.Tensor]:
    run(Path(folder), name, strategy)
    loops.forget()
    return loops.weights(Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DEVICES)
@pytest.mark.parametrize("name", ["muon", "schedule_free"])
def test_weights_are_those_of_a_plain_loop(name: str, strategy: str, tmp_path: Path) -> None:
    expected = plain(name)
    for found in run_distributed(trained, DEVICES[strategy], str(tmp_path), name, strategy):
        for key, value in expected.items():
            # Muon iterates in bf16; where weights are sharded, its sums are rounded otherwise.
            atol = 1e-3 if name == "muon" and strategy in ("fsdp", "tp") else 1e-6
            torch.testing.assert_close(found[key], value, rtol=0, atol=atol)


def refused(folder: str, name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(Path(folder), name, "zero2")
    loops.forget()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_does_not_have_them(name: str, tmp_path: Path) -> None:
    for text in run_distributed(refused, 2, str(tmp_path), name):
        assert "under ZeRO" in text or "under DeepSpeed" in text or "the engine steps" in text


@pytest.mark.slow
@needs_torchao
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_killed_run_goes_on_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    width = 1024 if name == "adamw_8bit" else 8  # smaller weights keep moments in fp32
    run(tmp_path / "whole", name, model=net(width))
    loops.killed(partial(run, name=name, model=net(width)), tmp_path / "killed", step=8)
    newest = loops.newest(tmp_path / "killed")
    run(tmp_path / "killed", name, resume_from=newest, model=net(width))
    assert loops.losses(tmp_path / "killed") == loops.losses(tmp_path / "whole")
    weights = loops.weights(tmp_path / "whole")
    assert all(torch.equal(w, weights[k]) for k, w in loops.weights(tmp_path / "killed").items())


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
        optimizers.schedule_free(net())
