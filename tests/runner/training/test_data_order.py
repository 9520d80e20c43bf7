"""R1, R2: samplers and streams train as a plain loop does, on processes and after a kill."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler, default_collate

from runner.data.datasets import Data
from tests import commands
from tests.helpers import about, run_distributed
from tests.runner.loops import (
    NUM_VALIDATION,
    Fit,
    Points,
    build,
    losses,
    optimizer,
    recipe_of,
    run,
    weights,
)

SETTINGS = {
    "trainer__epochs": 2,
    "trainer__micro_batch_tokens": 20,
    "dataloader__group_by_length": True,
}


def sampled() -> Data:
    sampler = WeightedRandomSampler([1.0, 3.0] * 20, 42)
    lengths = [1 + 7 * index % 13 for index in range(40)]
    return Data(Points(40, noisy=True), Points(NUM_VALIDATION), sampler=sampler, lengths=lengths)


def train_on_rank(run_dir: str, changes: dict[str, Any]) -> None:
    run(Path(run_dir), recipe_of(**changes), data=sampled(), make_scheduler=None)


def test_a_run_with_a_sampler_and_tokens_is_a_plain_loop(tmp_path: Path) -> None:
    recipe = recipe_of(**SETTINGS)
    loop = build(tmp_path / "one", recipe, data=sampled(), make_scheduler=None)
    model = copy.deepcopy(loop.accelerator.unwrap_model(loop.step.models["model"]))
    loop.run()
    plain, expected, batches = optimizer(model), [], loop._batches
    for epoch in range(2):
        batches._sampler.set_epoch(epoch)
        order = list(batches._sampler.sampler)
        for start in range(0, 42, 8):
            samples = [batches.loader.dataset[epoch, i] for i in order[start : start + 8]]
            loss = Fit().losses(model, default_collate(samples)).mean()
            loss.backward()
            plain.step()
            plain.zero_grad()
            expected.append(loss.item())
    assert losses(tmp_path / "one") == pytest.approx(expected, rel=1e-6)
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)
    two = {**SETTINGS, "dataloader__num_workers": 3}
    run_distributed(train_on_rank, 2, str(tmp_path / "two"), two)
    assert losses(tmp_path / "two") == about(expected)


MINE = """
import os, signal, torch
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler
from runner import Callback, Data, register

class Pictures(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return torch.randn(1, 8, 8) + index % 2, torch.tensor(index % 2)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(90))
    def make_sample(self, index):
        return Pictures()[index]

@register.data("sampled")
def sampled():
    lengths = [1 + 7 * index % 13 for index in range(60)]
    return Data(Pictures(), sampler=WeightedRandomSampler([1.0, 3.0] * 30, 90), lengths=lengths)

@register.data("streamed")
def streamed():
    return Data(Stream())

@register.callback("killed")
class Killed(Callback):
    def on_step(self, loop):
        if loop.state.step == 14 and "KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
"""
START = ("-m", "runner", "--import", "mine")
TRAINED = (
    *("trainer.epochs=2", "trainer.global_batch_size=8", "scheduler=null", "tracker.log_with=[]"),
    *("checkpoint.every_steps=5", "callbacks={killed: {name: killed}}", "deterministic=true"),
    *("distributed=multi_cpu", "dataloader.num_workers=3"),
)
SAMPLED = ("data={name: sampled}", "trainer.micro_batch_tokens=20")


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [(*SAMPLED, "dataloader.group_by_length=true"), ("data={name: streamed}",)]
)
def test_a_killed_run_ends_with_the_same_bits(data: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

    def runner(*words: str, code: int = 0, **more: str) -> None:
        answer = commands.run(*START, *words, cwd=tmp_path, environment={**environment, **more})
        assert answer.returncode == code, answer.stdout + answer.stderr

    runner(*data, *TRAINED, "run_dir=whole")
    runner(*data, *TRAINED, "run_dir=killed", code=1, KILL="1")
    runner("resume=killed")
    whole, killed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
