"""R8: a run says how fast it trains, where its time goes, and which rank holds the others up."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.config.training import GradientAccumulationPlugin, TorchDynamoPlugin
from runner.data.datasets import Data
from runner.training import speed
from runner.training.speed import Flops, clock_of, peak_of, slowest_rank
from runner.training.state import PHASES
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.loops import Fit, Points, recipe_of, records
from tests.runner.training.test_strategies import recipe_with

PAUSE = 0.02
FIT_FLOPS = 2 * (2 * 4 * 8) + 3 * (2 * 8)  # no gradient of the input


class Weighted(Fit):
    """Its samples have 3 items each."""

    def weights(self, batch: Any) -> torch.Tensor:
        return torch.full((len(batch[0]),), 3)


class SlowPoints(Points):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(PAUSE / 8)
        return super().__getitem__(index)


class SlowFit(Fit):
    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(PAUSE)
        return super().losses(model, batch)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(PAUSE)
        return super().step(closure)


class SlowCallback(loops.Spy):
    def on_log(self, loop: Any, values: Any) -> None:
        time.sleep(PAUSE)


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def test_tokens_are_counted_and_those_of_a_resumed_run_go_on(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__max_steps=8, trainer__log_every=3, trainer__stop_after=4)
    loops.run(tmp_path, recipe, objective=Weighted())
    recipe.trainer.stop_after = None
    loops.run(tmp_path, recipe, objective=Weighted(), resume_from=str(loops.newest(tmp_path)))
    found = records(tmp_path)
    assert [record["tokens"] for record in found] == [72, 144, 192]
    for record in found:
        assert record["tokens_per_second"] == pytest.approx(3 * record["samples_per_second"])
    assert summary(tmp_path)["tokens"] == 192
    assert summary(tmp_path)["speed"]["tokens_per_second"] > 0
    loops.run(tmp_path / "plain", recipe_of(trainer__epochs=1))  # a sample is one
    assert not any("tokens" in record for record in records(tmp_path / "plain"))


def test_the_time_of_each_phase_is_measured(tmp_path: Path) -> None:
    loop = loops.build(
        tmp_path,
        recipe_of(trainer__epochs=1, trainer__log_every=5),
        data=Data(SlowPoints(40), Points(13)),
        objective=SlowFit(),
        make_optimizer=lambda model: SlowSGD(model.parameters(), lr=0.01),
        callbacks={"slow": SlowCallback()},
    )
    loop.run()
    spent = summary(tmp_path)["speed"]["seconds"]
    least = {"data": 5, "forward_backward": 5, "optimizer": 5, "evaluation": 1, "callbacks": 1}
    for phase, steps in least.items():
        assert spent[phase] > steps * PAUSE, phase
    assert sum(spent.values()) <= loop.watch.elapsed
    assert spent["saving"] > 0
    (record,) = records(tmp_path)
    assert sum(record[f"time/{phase}"] for phase in (*PHASES, "other")) == pytest.approx(1)
    assert record["time/evaluation"] == record["time/saving"] == 0  # they follow the log point


@pytest.mark.parametrize("accumulation", [1, 2])
def test_operations_of_the_first_step_are_counted(accumulation: int, tmp_path: Path) -> None:
    settings = GradientAccumulationPlugin(num_steps=accumulation)
    recipe = recipe_of(trainer__epochs=1, trainer__accumulation=settings)
    loop = loops.build(tmp_path, recipe)
    loop.run()
    assert loop.speed.flops_per_sample == FIT_FLOPS
    for record in records(tmp_path):
        found = record["flops_per_second"] / record["samples_per_second"]
        assert found == pytest.approx(FIT_FLOPS)
        assert "mfu" not in record  # the peak of a CPU is not known


def test_operations_of_a_compiled_model_are_not_known(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__max_steps=1, compile=TorchDynamoPlugin(backend="eager"))
    loops.run(tmp_path, recipe)
    assert "flops_per_second" not in records(tmp_path)[0]


def test_attention_is_counted_forward_and_backward() -> None:
    query = torch.randn(2, 3, 8, 4, requires_grad=True)
    with Flops(lambda: True) as flops:
        output = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        forward = flops.total
        output.sum().backward()
    one = 2 * 2 * 3 * 8 * 8 * 4  # of one of its matrix products
    assert (forward, flops.total) == (2 * one, 7 * one)


def test_the_peak_is_that_of_device_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    device, names = torch.device("cuda"), ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA X1"]
    found = []
    for name in names:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found.append(peak_of(device, "bf16"))
    assert found == [989.5e12, 756e12, None]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-16GB")
    assert peak_of(device, "no") == 15.7e12
    assert peak_of(device, "bf16") is None
    assert peak_of(torch.device("cpu"), "bf16") is None


def test_the_mfu_is_the_share_of_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "peak_of", lambda device, precision: 1e9)
    loops.run(tmp_path, recipe_of(trainer__epochs=1))
    for record in [*records(tmp_path), summary(tmp_path)["speed"]]:
        assert record["mfu"] == pytest.approx(record["flops_per_second"] / 1e9)


def test_the_slowest_rank_is_compared_with_the_median() -> None:
    assert slowest_rank([1.0, 1.0, 2.0, 1.0]) == (2, 2.0)
    assert slowest_rank([3.0, 1.0]) == (0, 3.0)
    assert slowest_rank([0.0, 0.0]) == (0, 1.0)


def slow_on_rank_1(folder: str, engine: str) -> tuple[dict[str, Any], Any]:
    """Train with a rank whose forward passes are slow; return the last record and the count."""

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.2 * float(os.environ["RANK"]))
            return super().forward(x)

    recipe = recipe_with(engine, trainer__max_steps=4, trainer__log_every=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Slow(8, 1))
    loop = loops.build(Path(folder), recipe, model=model)
    result = loop.run()
    loops.forget()
    return result["speed"]["slowest_rank"], loop.speed.flops_per_sample


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero2", "zero3"])
def test_a_slow_rank_is_named(engine: str, tmp_path: Path) -> None:
    for slowest, flops in run_distributed(slow_on_rank_1, 2, str(tmp_path), engine):
        assert slowest["rank"] == 1
        assert slowest["ratio"] > 2
        assert flops == FIT_FLOPS / 2  # of this rank, over the samples of both


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_events() -> None:
    mark, between = clock_of(torch.device("cuda"))
    begin = mark()
    torch.randn(4096, 4096, device="cuda").square().sum()
    end = mark()
    end.synchronize()
    assert between(begin, end) > 0
