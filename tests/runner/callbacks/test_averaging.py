"""R1, R2: averaged weights are those of a plain loop, under each strategy, and resume exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from accel.checkpoint.directory import checkpoints
from accel.checkpoint.load import read_model
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import ConfigError
from runner.callbacks.averaging import EMA, SWA, Averaging
from runner.data.datasets import Data
from runner.recipe.schema import Recipe
from runner.training.loop import Loop
from runner.training.run import Callback
from tests.helpers import run_distributed
from tests.runner.loops import (
    NUM_VALIDATION,
    Points,
    Scripted,
    build,
    forget,
    newest,
    recipe_of,
    records,
    run,
)
from tests.runner.training import test_strategies as engines

STEPS, KILLED_AT = 10, 8
SHARDS = {"fsdp": FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")}
ENGINES: dict[str, dict[str, Any]] = {**engines.ENGINES, "shards": SHARDS}
AVERAGES: dict[str, Callable[[], Averaging]] = {
    "ema": lambda: EMA(decay=0.7),
    "late ema": lambda: EMA(decay=0.9, warmup=False, every=2, start=4),
    "swa": lambda: SWA(start=0.5),
    "swa by steps": lambda: SWA(start=3, every=2, lr=0.005),
}
Weights = Mapping[str, torch.Tensor]


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing is saved."""


class Recorder(Callback):
    """Keeps the full training weights after each step, and may kill the run after one."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at = killed_at
        self.seen: list[Weights] = []

    def on_start(self, loop: Loop) -> None:
        self._keep(loop)

    def on_step(self, loop: Loop) -> None:
        if loop.state.step == self.killed_at:
            raise Killed
        self._keep(loop)

    def on_evaluation_end(self, loop: Loop, split: str) -> None:
        self._keep(loop)

    def _keep(self, loop: Loop) -> None:
        state = loop.accelerator.strategy.state.model_state(loop.step.models["model"])
        self.seen.append({name: value.clone() for name, value in state.items()})


def run_killed(
    run_dir: Path, recipe: Recipe, make: Callable[[], Callback], killed_at: int | None
) -> list[Weights]:
    """Train, killed after a step and resumed; return the training weights at each event."""
    recorder = Recorder(killed_at)
    try:
        run(run_dir, recipe, callbacks={"it": make(), "recorder": recorder})
    except Killed:
        recorder.killed_at, resumed = None, str(newest(run_dir))
        run(run_dir, recipe, callbacks={"it": make(), "recorder": recorder}, resume_from=resumed)
    forget()
    return recorder.seen


def train(folder: str, average: str, engine: str, killed: bool = False) -> list[Weights]:
    recipe = recipe_of(
        trainer__max_steps=STEPS,
        trainer__epochs=None,
        trainer__eval_every=5,
        checkpoint__every_epochs=None,
        checkpoint__every_steps=5,
        **ENGINES[engine],
    )
    return run_killed(Path(folder), recipe, AVERAGES[average], KILLED_AT if killed else None)


def plain_ema(seen: list[Weights], decays: Callable[[int], float]) -> Weights:
    """Average weights with a decay for each update."""
    average = {name: value.double() for name, value in seen[0].items()}
    for t, weights in enumerate(seen[1:]):
        decay = decays(t)
        for name, value in average.items():
            value.mul_(decay).add_(weights[name].double(), alpha=1 - decay)
    return average


def plain_swa(seen: list[Weights]) -> Weights:
    """Return the mean of weights."""
    return {name: torch.stack([one[name].double() for one in seen]).mean(0) for name in seen[0]}


PLAIN: dict[str, Callable[[list[Weights]], Weights]] = {
    "ema": lambda seen: plain_ema(seen[1:], lambda t: min(0.7, (1 + t) / (10 + t))),
    "late ema": lambda seen: plain_ema(seen[4::2], lambda t: 0.9),
    "swa": lambda seen: plain_swa(seen[5::5]),
    "swa by steps": lambda seen: plain_swa(seen[3::2]),
}


def check(whole: Path, average: str, seen: list[Weights]) -> None:
    """Compare checkpoint and evaluations of a run with those of a plain loop."""
    after = seen.pop(6), seen.pop(11), seen.pop(11)  # evaluations
    assert len(seen) == STEPS + 1
    for one, step in zip(after, (5, STEPS, STEPS), strict=True):
        equal(one, seen[step])
    expected = PLAIN[average](seen)
    saved = read_model(newest(whole))
    for name, value in expected.items():
        torch.testing.assert_close(saved[name].double(), value, rtol=0, atol=1e-6)
    x, y = Points(NUM_VALIDATION).x, Points(NUM_VALIDATION).y
    hidden = torch.tanh(x @ saved["0.weight"].T + saved["0.bias"])
    loss = ((hidden @ saved["3.weight"].T + saved["3.bias"])[:, 0] - y).square().mean()
    assert records(whole, "validation")[-1]["loss"] == pytest.approx(float(loss), rel=1e-5)


def equal(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_are_those_of_a_plain_loop_and_resume_exactly(
    average: str, tmp_path: Path
) -> None:
    whole, killed = (train(str(tmp_path / n), average, "ddp", n == "cut") for n in ("one", "cut"))
    equal(whole[-1], killed[-1])
    equal(read_model(newest(tmp_path / "one")), read_model(newest(tmp_path / "cut")))
    check(tmp_path / "one", average, whole)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["ema", "swa"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "shards", "tp", "zero2", "zero3"])
def test_averages_under_each_strategy(engine: str, average: str, tmp_path: Path) -> None:
    whole, killed = (
        run_distributed(train, 2, str(tmp_path / n), average, engine, n == "cut")[0]
        for n in ("one", "cut")
    )
    equal(whole[-1], killed[-1])
    equal(read_model(newest(tmp_path / "one")), read_model(newest(tmp_path / "cut")))
    check(tmp_path / "one", average, whole)


def train_with_statistics(folder: str, size: int, killed: bool) -> None:
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    common: dict[str, Any] = {"data": Data(Points(32), Points(9)), "make_scheduler": None}
    common["model"] = nn.Sequential(*layers)
    torch.manual_seed(3)
    for layer in (layers[0], layers[3]):
        layer.reset_parameters()
    for epochs, resumed in ((2, False), (4, True)) if killed else ((4, False),):
        recipe = recipe_of(trainer__epochs=epochs, trainer__eval_batch_size=size)
        common["resume_from"] = str(newest(Path(folder))) if resumed else None
        build(Path(folder), recipe, callbacks={"swa": SWA(start=4, lr=0.005)}, **common).run()
    forget()


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_statistics_of_averaged_weights_are_computed_anew(
    num_processes: int, tmp_path: Path
) -> None:
    found = []
    for name in ("one", "cut"):  # the first part of which was complete: its statistics are new
        arguments = (str(tmp_path / name), 8 // num_processes, name == "cut")
        if num_processes == 1:
            train_with_statistics(*arguments)
        else:
            run_distributed(train_with_statistics, num_processes, *arguments)
        found.append(read_model(newest(tmp_path / name)))
        assert records(tmp_path / name)[-1]["lr"] == 0.005
    equal(*found)
    state = found[0]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model.load_state_dict({name: value for name, value in state.items() if name[0] in "01"})
    update_bn(Points(32).x.split(8 // num_processes), model)
    for name in ("1.running_mean", "1.running_var"):
        value = model.get_buffer(name)
        torch.testing.assert_close(state[name].double(), value.double(), rtol=0, atol=1e-6)


class Looker(Callback):
    """Keeps the weights of the model during a test, and after it."""

    def on_evaluation_start(self, loop: Loop, split: str) -> None:
        self.on_end(loop)

    def on_end(self, loop: Loop) -> None:
        state = loop.step.models["model"].state_dict()
        self.seen = [*getattr(self, "seen", []), {n: v.clone() for n, v in state.items()}]


def test_the_test_is_of_the_best_averages(tmp_path: Path) -> None:
    looker = Looker()
    recipe = recipe_of(trainer__epochs=2)
    callbacks = {"ema": EMA(decay=0.7), "looker": looker}
    run(tmp_path, recipe, callbacks=callbacks, objective=Scripted(1.0, 2.0, 3.0))
    first, *_ = checkpoints(tmp_path / "checkpoints")
    equal(looker.seen[0], read_model(first))
    equal(looker.seen[2], read_model(first))
    equal(looker.seen[3], read_model(first))


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"every": 0}, {"start": 0}])
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"ema.{name}="):
        EMA(**wrong)
    with pytest.raises(ConfigError, match=r"swa.start=1.5.*\n.*swa.every=0.*\n.*swa.lr=0"):
        SWA(start=1.5, every=0, lr=0)
