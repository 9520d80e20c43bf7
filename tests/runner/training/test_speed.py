"""R8: a run says how fast it trains, where its time goes, and which rank holds the others up."""

from __future__ import annotations

import os
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.config.training import GradientAccumulationPlugin, TorchDynamoPlugin
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


def slowly(owner: Any, method: Any, seconds: float, *given: Any) -> Any:
    time.sleep(seconds)
    return method(owner, *given)


def test_tokens_are_counted_and_those_of_a_resumed_run_go_on(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__max_steps=8, trainer__log_every=3, trainer__stop_after=4)
    loops.run(tmp_path, recipe, objective=Weighted())
    recipe.trainer.stop_after = None
    checkpoint = str(loops.newest(tmp_path))
    summary = loops.run(tmp_path, recipe, objective=Weighted(), resume_from=checkpoint)
    found = records(tmp_path)
    assert [record["tokens"] for record in found] == [72, 144, 192]
    for record in found:
        assert record["tokens_per_second"] == pytest.approx(3 * record["samples_per_second"])
    assert summary["tokens"] == 192
    assert summary["speed"]["tokens_per_second"] > 0
    loops.run(tmp_path / "plain", recipe_of(trainer__epochs=1))  # a sample is one
    assert not any("tokens" in record for record in records(tmp_path / "plain"))


def test_the_time_of_each_phase_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((Fit, "losses"), (Points, "__getitem__"), (torch.optim.AdamW, "step")):
        slow = partialmethod(slowly, getattr(owner, name), PAUSE / (8 if owner is Points else 1))
        monkeypatch.setattr(owner, name, slow)
    recipe = recipe_of(trainer__epochs=1, trainer__log_every=5)
    loop = loops.build(tmp_path, recipe, callbacks={"spy": loops.Spy()})
    spent: Any = loop.run()["speed"]["seconds"]
    least = {"data": 5, "forward_backward": 5, "optimizer": 5, "evaluation": 1}
    for phase, steps in least.items():
        assert spent[phase] > steps * PAUSE, phase
    assert sum(spent.values()) <= loop.watch.elapsed
    assert spent["saving"] > 0
    assert spent["callbacks"] > 0
    (record,) = records(tmp_path)
    assert sum(record[f"time/{phase}"] for phase in (*PHASES, "other")) == pytest.approx(1)
    assert record["time/evaluation"] == record["time/saving"] == 0  # they follow the log point


@pytest.mark.parametrize(("accumulation", "peak"), [(1, None), (2, 1e9)])
def test_operations_of_the_first_step_are_counted(
    accumulation: int, peak: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "peak_of", lambda device, precision: peak)
    settings = GradientAccumulationPlugin(num_steps=accumulation)
    result = loops.run(tmp_path, recipe_of(trainer__epochs=1, trainer__accumulation=settings))
    for found in [*records(tmp_path), result["speed"]]:
        flops = found["flops_per_second"]
        assert flops / found["samples_per_second"] == pytest.approx(FIT_FLOPS)
        assert found.get("mfu") == (peak and pytest.approx(flops / peak))


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
    assert peak_of(torch.device("cpu"), "bf16") is None


def test_the_slowest_rank_is_compared_with_the_median() -> None:
    assert slowest_rank([1.0, 1.0, 2.0, 1.0]) == (2, 2.0)
    assert slowest_rank([3.0, 1.0]) == (0, 3.0)


def slow_on_rank_1(folder: str, engine: str) -> dict[str, Any]:
    """Train with a rank whose forward passes are slow; return the speed and the operations."""

    recipe = recipe_with(engine, trainer__max_steps=4, trainer__log_every=2)
    loop = loops.build(Path(folder), recipe)
    layer: Any = loop.accelerator.unwrap_model(loop.step.models["model"])[0]
    layer.register_forward_pre_hook(lambda *_: time.sleep(0.2 * float(os.environ["RANK"])))
    result = loop.run()
    loops.forget()
    return {**result["speed"], "flops": loop.speed.flops_per_sample}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero2", "zero3"])
def test_a_slow_rank_is_named(engine: str, tmp_path: Path) -> None:
    found = run_distributed(slow_on_rank_1, 2, str(tmp_path), engine)
    for one in found:
        assert one["slowest_rank"]["rank"] == 1
        assert one["slowest_rank"]["ratio"] > 2
        assert one["flops"] == FIT_FLOPS / 2  # of this rank, over the samples of both
    exchanges = [one["seconds"].get("communication") for one in found]
    assert exchanges[0] > 4 * 0.15 if engine == "ddp" else exchanges == [None, None]


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_events() -> None:
    mark, between = clock_of(torch.device("cuda"))
    begin = mark()
    torch.randn(4096, 4096, device="cuda").square().sum()
    end = mark()
    end.synchronize()
    assert between(begin, end) > 0
