"""C1, L1: metrics see each sample once, with the same bits however samples are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from runner import cli
from runner.recipe.composition import Examined
from runner.recipe.factory import check_factories, register
from runner.runs import json_files
from runner.training import build
from tests.runner.loops import Fit, recipe_of, records, run
from tests.runner.trained_runs import make_run

OF_CLASSES = ("MulticlassAccuracy", "MulticlassF1Score", "MulticlassAUROC")
MSE = {"_target_": "torchmetrics.MeanSquaredError"}
imports_torchmetrics = pytest.mark.slow  # which takes seconds


@register.metric("own_mse")
class OwnMSE(nn.Module):
    """Sums in fp32, as those of torchmetrics do."""

    def reset(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.total, self.count = (
            self.total + (preds - target).square().sum(),
            self.count + len(preds),
        )

    def compute(self) -> torch.Tensor:
        return self.total / self.count


class Scale(nn.Linear):
    """Its output for a sample has the same bits in any batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] + 0 * self.weight.sum()


class Still(Fit):
    """Its gradient is zero."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square() * (0.0 if model.training else 1.0)


@pytest.mark.parametrize(
    "node", [{"name": "own_mse"}, pytest.param(MSE, marks=imports_torchmetrics)]
)
def test_batches_of_any_size_give_the_same_bits(node: Any, tmp_path: Path) -> None:
    values = []
    for batch in (13, 5, 1):
        recipe = recipe_of(trainer__epochs=1, trainer__eval_batch_size=batch, metrics={"mse": node})
        run(tmp_path / str(batch), recipe, model=Scale(4, 1), objective=Still())
        values += [
            (one["mse"], one["loss"]) for one in records(tmp_path / str(batch), "validation")
        ]
    assert len({mse for mse, _ in values}) == 1
    assert values[0][0] == pytest.approx(values[0][1], rel=1e-6)


@pytest.mark.slow  # it starts two processes, which import PyTorch
def test_two_processes_with_an_uneven_last_batch_give_the_digits_of_one(tmp_path: Path) -> None:
    nodes = [
        f"{n}: {{_target_: torchmetrics.classification.{n}, num_classes: 10}}" for n in OF_CLASSES
    ]
    run_dir = make_run(tmp_path, f"+metrics={{{', '.join(nodes)}}}")
    found = []
    for more in ([], ["--processes", "2"]):
        assert cli.main(["eval", str(run_dir), "trainer.eval_batch_size=50", *more]) == 0
        found.append(json_files.read_evaluations(run_dir)[-1])
    assert [one["num_processes"] for one in found] == [1, 2]
    for split in ("validation", "test"):  # 180 and 360 samples
        one, two = ({n: f["metrics"][split][n] for n in OF_CLASSES} for f in found)
        assert one == two


def test_an_unknown_metric_is_refused() -> None:
    told = [str(one) for one in check_factories(recipe_of(metrics={"x": {"name": "no_such"}}))]
    assert any("metrics.x.name='no_such': no metrics factory has that name" in one for one in told)


@imports_torchmetrics
def test_a_metric_that_cannot_be_built_is_refused_before_the_start() -> None:
    node = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 1}
    recipe = recipe_of(metrics={"x": node}, step={"name": "gan"})
    with pytest.raises(ConfigError, match="Expected argument `num_classes` to be an integer"):
        build.check_steps([Examined(recipe, [], (), "config")])


def test_inputs_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    class Pairs(Still):
        def metric_inputs(self, output: Any, batch: Any) -> Any:
            return None

    recipe = recipe_of(trainer__sanity_steps=1, metrics={"mse": {"name": "own_mse"}})
    with pytest.raises(ConfigError, match="metric_inputs returned None: metrics take tensors"):
        run(tmp_path, recipe, model=Scale(4, 1), objective=Pairs())
