"""R1, R2: averaged weights are those of a plain loop, under each strategy, and resume exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
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
from runner.training.loop import Loop
from runner.training.run import Callback
from tests.helpers import run_distributed
from tests.runner import loops, plain_loops
from tests.runner.training import test_strategies as engines

STEPS = 10
SHARDS = {"fsdp": FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")}
ENGINES: dict[str, dict[str, Any]] = {**engines.ENGINES, "shards": SHARDS}
NAMES = ("ddp", "fsdp", "shards", "tp", "zero2", "zero3")
AVERAGES: dict[str, Callable[[], Averaging]] = {
    "ema": lambda: EMA(decay=0.7),
    "late ema": lambda: EMA(decay=0.9, warmup=False, every=2, start=4),
    "swa": lambda: SWA(start=0.5),
    "swa by steps": lambda: SWA(start=3, every=2, lr=0.005),
}
Weights = Mapping[str, torch.Tensor]


class Recorder(Callback):
    """Keeps the full weights at each event."""

    def __init__(self) -> None:
        self.seen: list[Weights] = []

    def on_start(self, loop: Loop, split: str = "") -> None:
        state = loop.accelerator.strategy.state.model_state(loop.step.models["model"])
        self.seen.append({name: value.clone() for name, value in state.items()})

    on_step = on_evaluation_start = on_evaluation_end = on_start


def train(folder: str, average: str, engine: str, killed_after: int | None = None) -> list[Weights]:
    recipe = loops.recipe_of(
        trainer__max_steps=STEPS,
        trainer__epochs=None,
        trainer__eval_every=5,
        checkpoint__every_epochs=None,
        checkpoint__every_steps=5,
        **ENGINES[engine],
    )
    callbacks = {"it": AVERAGES[average](), "recorder": (recorder := Recorder())}
    plain_loops.go_on(folder, recipe, killed_after, callbacks=callbacks)
    return recorder.seen


def plain(seen: list[Weights], share: Callable[[int], float]) -> Weights:
    """Move averages to the weights after each update by a share of the distance."""
    average = {name: value.double() for name, value in seen[0].items()}
    for t, weights in enumerate(seen[1:]):
        for name, value in average.items():
            value.mul_(1 - share(t)).add_(weights[name].double(), alpha=share(t))
    return average


PLAIN: dict[str, Callable[[list[Weights]], Weights]] = {
    "ema": lambda seen: plain(seen[1:], lambda t: 1 - min(0.7, (1 + t) / (10 + t))),
    "late ema": lambda seen: plain(seen[4::2], lambda t: 0.1),
    "swa": lambda seen: plain(seen[5::5], lambda t: 1 / (t + 2)),
    "swa by steps": lambda seen: plain(seen[3::2], lambda t: 1 / (t + 2)),
}


def check(whole: Path, average: str, seen: list[Weights]) -> None:
    """Compare checkpoint and evaluations of a run with a plain loop's averages."""
    del seen[6]  # during the evaluation of step 5
    equal(seen.pop(6), seen[5])
    evaluated, after, _, last = (seen.pop(11) for _ in range(4))
    equal(after, seen[STEPS])
    equal(last, seen[STEPS])
    equal(evaluated, read_model(loops.newest(whole)))
    for name, value in PLAIN[average](seen).items():
        torch.testing.assert_close(evaluated[name].double(), value, rtol=0, atol=1e-6)


def equal(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("average", "engine", "num_processes"),
    [
        *((average, "ddp", 1) for average in AVERAGES),
        *(
            pytest.param(*pair, 2, marks=pytest.mark.slow)
            for pair in product(("ema", "swa"), NAMES)
        ),
    ],
)
def test_averages_are_those_of_a_plain_loop_and_resume_exactly(
    average: str, engine: str, num_processes: int, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    seen, *_ = run_distributed(train, num_processes, str(whole), average, engine)
    plain_loops.killed(train, num_processes, str(cut), average, engine, after=8)
    plain_loops.equal_runs(whole, cut, ".metadata")  # of sharded files
    check(whole, average, seen)


def train_with_statistics(folder: str, size: int, killed: bool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    common: dict[str, Any] = {
        "data": Data(loops.Points(32), loops.Points(9)),
        "make_scheduler": None,
    }
    for epochs, resumed in ((2, False), (4, True)) if killed else ((4, False),):
        recipe = loops.recipe_of(trainer__epochs=epochs, trainer__eval_batch_size=size)
        common["resume_from"] = str(loops.newest(Path(folder))) if resumed else None
        callbacks = {"swa": SWA(start=4, lr=0.005)}
        loops.run(Path(folder), recipe, model=model, callbacks=callbacks, **common)
    loops.forget()


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_statistics_of_averaged_weights_are_computed_anew(
    num_processes: int, tmp_path: Path
) -> None:
    found, size = [], 8 // num_processes
    for name in ("one", "cut"):  # the first part of which was complete: its statistics are new
        folder = str(tmp_path / name)
        run_distributed(train_with_statistics, num_processes, folder, size, name == "cut")
        found.append(read_model(loops.newest(tmp_path / name)))
        assert loops.records(tmp_path / name)[-1]["lr"] == 0.005
    equal(*found)
    state: Any = found[0]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model.load_state_dict({name: value for name, value in state.items() if name[0] in "01"})
    update_bn(loops.Points(32).x.split(size), model)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(state[name], model.get_buffer(name), rtol=0, atol=1e-6)


def test_the_test_is_of_the_best_averages(tmp_path: Path) -> None:
    recorder, losses = Recorder(), loops.Scripted(1.0, 2.0, 3.0)
    callbacks = {"ema": EMA(decay=0.7), "recorder": recorder}
    loops.run(tmp_path, loops.recipe_of(trainer__epochs=2), callbacks=callbacks, objective=losses)
    best, *_ = checkpoints(tmp_path / "checkpoints")
    for seen in (recorder.seen[6], *recorder.seen[-2:]):
        equal(seen, read_model(best))


def test_arguments_out_of_range_are_refused() -> None:
    for wrong in ({"decay": 1.0}, {"every": 0}, {"start": 0}):
        with pytest.raises(ConfigError, match=r"ema\."):
            EMA(**wrong)
    with pytest.raises(ConfigError, match=r"swa\."):
        SWA(every=0)
