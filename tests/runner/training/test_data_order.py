"""R1, R2: samplers and streams train as a plain loop does, on processes and after a kill."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.utils.data import WeightedRandomSampler, default_collate

from runner.data.datasets import Data
from tests.helpers import about, run_distributed
from tests.runner import loops, plain_loops
from tests.runner.loops import losses, recipe_of, weights

LENGTHS = [1 + 7 * index % 13 for index in range(40)]
SAMPLED = {"trainer__micro_batch_tokens": 20, "dataloader__group_by_length": True}
SETTINGS = {"trainer__epochs": 2, "checkpoint__every_steps": 4, "checkpoint__every_epochs": None}


def data(streamed: bool = False) -> Data:
    if streamed:
        return Data(loops.Stream(42))
    sampler = WeightedRandomSampler([1.0, 3.0] * 20, 42)
    return Data(loops.Points(40, noisy=True), sampler=sampler, lengths=LENGTHS)


def train(
    folder: str, workers: int = 3, streamed: bool = False, killed_after: int | None = None
) -> None:
    changes = {**SETTINGS, **({} if streamed else SAMPLED), "dataloader__num_workers": workers}
    given = {"data": data(streamed), "make_scheduler": None}
    plain_loops.go_on(folder, recipe_of(**changes), killed_after, **given)


def test_a_run_with_a_sampler_and_tokens_is_a_plain_loop(tmp_path: Path) -> None:
    recipe = recipe_of(**SETTINGS, **SAMPLED)
    loop = loops.build(tmp_path / "one", recipe, data=data(), make_scheduler=None)
    model = copy.deepcopy(loop.accelerator.unwrap_model(loop.step.models["model"]))
    loop.run()
    plain, expected, batches = loops.optimizer(model), [], loop._batches
    for epoch in range(2):
        batches._sampler.set_epoch(epoch)
        order = list(batches._sampler.sampler)
        for start in range(0, 42, 8):
            samples = [batches.loader.dataset[epoch, i] for i in order[start : start + 8]]
            loss = loops.Fit().losses(model, default_collate(samples)).mean()
            loss.backward()
            plain.step()
            plain.zero_grad()
            expected.append(loss.item())
    assert losses(tmp_path / "one") == pytest.approx(expected, rel=1e-6)
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)
    run_distributed(train, 2, str(tmp_path / "two"))
    assert losses(tmp_path / "two") == about(expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_killed_run_ends_with_the_same_bits(
    streamed: bool, num_processes: int, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_distributed(train, num_processes, str(whole), 0, streamed)
    plain_loops.killed(train, num_processes, str(cut), 3, streamed, after=7)
    plain_loops.equal_runs(whole, cut)
