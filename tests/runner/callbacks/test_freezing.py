"""R1, R2: frozen layers stay as they are, and unfrozen ones train as in a plain loop."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.checkpoint.load import read_model
from accel.machine.errors import ConfigError
from runner.callbacks.averaging import EMA
from runner.callbacks.freezing import Freeze
from runner.training.run import Callback
from tests.helpers import run_distributed
from tests.runner import loops, plain_loops
from tests.runner.training.test_strategies import ENGINES

STEPS = 12  # each an epoch
UNFREEZE: dict[str, dict[str, Any]] = {  # at the same steps
    "epoch": {"unfreeze": {4: ["0.w*"], "9": "3.bias"}},
    "step": {"unfreeze": {3: ["0.w*"], 8: "3.bias"}, "by": "step"},  # and with averages
}
SINCE = {"0.weight": 3, "0.bias": STEPS, "3.bias": 8}


def train(folder: str, by: str, engine: str, killed_after: int | None = None) -> None:
    recipe = loops.recipe_of(
        trainer__epochs=STEPS,
        trainer__global_batch_size=loops.NUM_TRAIN,
        checkpoint__every_epochs=3,
        **ENGINES[engine],
    )
    callbacks: dict[str, Callback] = {"freeze": Freeze(["0.*", "3.b*"], **UNFREEZE[by])}
    if by == "step":
        callbacks["ema"] = EMA(decay=0.7, warmup=False, every=2)
    plain_loops.go_on(folder, recipe, killed_after, callbacks=callbacks)


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Tanh(), nn.Linear(8, 1))


def check(folder: Path, averaged: bool) -> None:
    """Compare a run's weights, or their averages, with those of a plain loop."""
    model, data = network(), loops.Points(loops.NUM_TRAIN)
    optimizer, named = loops.optimizer(model), dict(model.named_parameters())
    scheduler = loops.scheduler(optimizer, STEPS)
    for step in range(STEPS):
        for name, since in SINCE.items():
            named[name].requires_grad_(step >= since)
        optimizer.zero_grad()
        (model(data.x).squeeze(-1) - data.y).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if step == 0:
            averages = copy.deepcopy(model.state_dict())
        for name, value in model.state_dict().items() if step % 2 == 0 else ():
            averages[name].lerp_(value, 0.3)
    weights = read_model(loops.newest(folder))
    for name, value in (averages if averaged else model.state_dict()).items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("by", "engine", "num_processes"),
    [
        *((by, "ddp", 1) for by in UNFREEZE),
        *(
            pytest.param(*pair, 2, marks=pytest.mark.slow)
            for pair in product(UNFREEZE, ("ddp", "fsdp", "tp"))
        ),
    ],
)
def test_frozen_layers_train_as_in_a_plain_loop_and_resume_exactly(
    by: str, engine: str, num_processes: int, tmp_path: Path
) -> None:
    run_distributed(train, num_processes, str(tmp_path / "whole"), by, engine)
    for after in (5, 10):
        cut = tmp_path / f"cut_{after}"
        plain_loops.killed(train, num_processes, str(cut), by, engine, after=after)
        plain_loops.equal_runs(tmp_path / "whole", cut, "optimizer.bin")
    check(tmp_path / "whole", averaged=by == "step")


def refused_or_frozen(folder: str, engine: str, words: str) -> bool:
    run_dir, recipe = Path(folder), loops.recipe_of(trainer__max_steps=3, **ENGINES[engine])
    with pytest.raises(ConfigError, match=f"freeze.unfreeze with {words}"):
        loops.run(run_dir, recipe, callbacks={"freeze": Freeze("0.*", {2: "*"})})
    loops.run(run_dir, recipe, model=network(), callbacks={"freeze": Freeze("0.*")})
    loops.forget()
    weights, before = read_model(loops.newest(run_dir)), network().state_dict()
    return all(torch.equal(weights[name], before[name]) is (name[0] == "0") for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "words"), [("zero3", "deepspeed"), ("pp", "pipeline stages")])
def test_a_strategy_that_cannot_unfreeze_freezes(engine: str, words: str, tmp_path: Path) -> None:
    assert run_distributed(refused_or_frozen, 2, str(tmp_path), engine, words)[0]


def test_names_that_match_nothing_are_refused(tmp_path: Path) -> None:
    freeze = Freeze(["0.*", "9.*"], unfreeze={2: "3.*"})
    with pytest.raises(ConfigError, match=r"freeze.names: 9.\*.*\n.*freeze.unfreeze.2: 3.\*"):
        loops.run(tmp_path, loops.recipe_of(), callbacks={"freeze": freeze})
    with pytest.raises(ConfigError, match=r"Write unfreeze"):
        Freeze("*", unfreeze={"first": "*"})


def test_batch_norms_of_frozen_layers_keep_their_statistics(tmp_path: Path) -> None:
    norms = [nn.BatchNorm1d(8) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 8), *norms, nn.Linear(8, 1))
    freeze = Freeze("[012].*", unfreeze={4: "1.*"}, eval_mode=True)
    loops.run(tmp_path, loops.recipe_of(), model=model, callbacks={"freeze": freeze})
    assert [int(norm.num_batches_tracked) for norm in norms] == [5, 0, 20]
