"""R1, C1: monitors tell what a plain loop computes, also of sharded weights, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runner import cli
from runner.callbacks.monitors import Histograms, OptimizerMonitor
from tests.runner import loops
from tests.runner.launch.test_sharded_runs import trained, write_text
from tests.runner.loops import recipe_of

ON = "callbacks=histograms"
KINDS = ("gradients", "weights")


def test_histograms_are_those_of_weights_and_gradients(tmp_path: Path) -> None:
    callbacks = {"histograms": Histograms(every=2, pattern="model.0.*")}
    loops.run(tmp_path, recipe_of(trainer__epochs=1), callbacks=callbacks)
    for step in ("0", "2", "4"):
        found = sorted((tmp_path / "media" / step).iterdir())
        kinds = [
            f"{of}_model.0.{name}.csv"
            for of in ("gradients", "weights")
            for name in ("bias", "weight")
        ]
        assert [path.name for path in found] == kinds
        lines = [path.read_text().splitlines()[1:] for path in found]
        assert [sum(int(one.rpartition(",")[2]) for one in of) for of in lines] == [8, 32, 8, 32]


def test_norms_and_updates_are_those_of_the_plain_step(tmp_path: Path) -> None:
    monitor = {"monitor": OptimizerMonitor()}
    loop = loops.build(tmp_path, recipe_of(trainer__epochs=1), callbacks=monitor)
    model, parameters = loop.step.models["model"], list(loop.step.models["model"].parameters())
    batch = next(iter(loop._batches.epoch(0))).micro_batches[0].batch
    gradients = torch.autograd.grad(loops.Fit().losses(model, batch).mean(), parameters)
    both = (gradients, parameters)
    norm, size = (torch.cat([one.detach().flatten() for one in of]).norm().item() for of in both)
    loop.run()
    found = loops.records(tmp_path)
    assert found[0]["grad_norm_0"] == pytest.approx(norm, rel=1e-5)
    # The first step of Adam changes each weight by the rate, and decays it by a hundredth of that.
    change = 0.02 * sum(p.numel() for p in parameters) ** 0.5
    assert found[0]["update_ratio_0"] == pytest.approx(change / size, rel=1e-2)
    assert all("update_ratio_0" in one for one in found)


@pytest.mark.slow  # it starts several processes, which import PyTorch
def test_sharded_weights_have_the_values_of_whole_ones(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    whole, *others = (trained(tmp_path, text, name, ON) for name in ("one", "two", "split"))
    for run_dir in others:
        for path in (whole / "media" / "0").iterdir():
            other = (run_dir / "media" / "0" / path.name).read_text()
            assert path.name.startswith("gradients") or other == path.read_text()


@pytest.mark.slow  # it starts two processes, which import PyTorch
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["deepspeed=zero2"], "callbacks.histograms: the engine hides gradients"),
        (["experiment=bytes_gpt", "parallelism.pp_size=2"], "other stages hold some"),
    ],
)
def test_an_engine_with_gradients_of_its_own_is_refused(
    given: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*given, "distributed=multi_cpu", ON, "tracker=none"]) == 2
    assert words in capfd.readouterr().err


def test_a_summary_is_kept_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["trainer.max_steps=1", "trainer.limit_eval_batches=1", "tracker=none", "run_dir=r"]
    short.append("data.num_variants=1")
    assert cli.main(["callbacks=model_summary", "callbacks.model_summary.depth=1", *short]) == 0
    rows = (tmp_path / "r" / "media" / "0" / "model_summary.txt").read_text().splitlines()
    assert rows[1].split() == ["model", "CNN", "38,314", "2x10"]
    assert [row.split()[0] for row in rows[2:]] == ["model.features", "model.dropout", "model.head"]
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["complete"]
