"""R1, R2: samplers and streams train as a plain loop does, on processes and after a kill."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler, default_collate

from runner.data.datasets import Data
from runner.training.run import Callback
from tests.helpers import about, run_distributed
from tests.runner import loops
from tests.runner.loops import losses, recipe_of, weights

LENGTHS = [1 + 7 * index % 13 for index in range(40)]
SAMPLED = {"trainer__micro_batch_tokens": 20, "dataloader__group_by_length": True}
SETTINGS = {"trainer__epochs": 2, "checkpoint__every_steps": 4, "checkpoint__every_epochs": None}


class Killer(Callback):
    def on_step(self, loop: Any) -> None:
        if loop.state.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def data(streamed: bool = False) -> Data:
    if streamed:
        return Data(loops.Stream(42))
    sampler = WeightedRandomSampler([1.0, 3.0] * 20, 42)
    return Data(loops.Points(40, noisy=True), sampler=sampler, lengths=LENGTHS)


def train(folder: str, workers: int = 3, streamed: bool = False, **kwargs: Any) -> None:
    changes = {**SETTINGS, **({} if streamed else SAMPLED), "dataloader__num_workers": workers}
    recipe = recipe_of(**changes)
    loops.run(Path(folder), recipe, data=data(streamed), make_scheduler=None, **kwargs)


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
@pytest.mark.parametrize("streamed", [False, True])
def test_a_killed_run_ends_with_the_same_bits(streamed: bool, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(str(whole), 0, streamed)
    kwargs = {"callbacks": {"killer": Killer()}}
    arguments = (str(killed), 3, streamed)
    fork = multiprocessing.get_context("fork")
    (process := fork.Process(target=train, args=arguments, kwargs=kwargs)).start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    train(str(killed), 3, streamed, resume_from=loops.newest(killed))
    assert losses(killed) == losses(whole)
    found = weights(killed)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(whole).items())
