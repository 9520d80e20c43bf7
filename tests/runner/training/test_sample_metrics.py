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
        if preds.shape != target.shape:
            raise ValueError("shapes differ.")
        self.total, self.count = (
            self.total + (preds - target).square().sum(),
            self.count + len(preds),
        )

    def compute(self) -> dict[str, torch.Tensor]:
        return {"mean": self.total / self.count}


class Scale(nn.Module):
    """Its output for a sample has the same bits in any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] * self.weight


class Still(Fit):
    """Its gradient is zero."""

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square() * (0.0 if model.training else 1.0)


def measured(run_dir: Path, batch: int, **changes: Any) -> list[dict[str, Any]]:
    recipe = recipe_of(trainer__epochs=1, trainer__eval_batch_size=batch, **changes)
    run(run_dir, recipe, model=Scale(), objective=Still())
    return records(run_dir, "validation")


def test_batches_of_any_size_give_the_same_bits(tmp_path: Path) -> None:
    metrics = {"mse": MSE, "other": {"_target_": "torchmetrics.MetricCollection", "metrics": [MSE]}}
    values = []
    for batch in (13, 5, 1):
        (found,) = measured(
            tmp_path / str(batch), batch, metrics=metrics, checkpoint__monitor="mse"
        )
        values.append((found["mse"], found["other_MeanSquaredError"]))
        assert found["mse"] == pytest.approx(found["loss"], rel=1e-6)
    assert len(set(values)) == 1


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


@pytest.mark.parametrize(
    ("node", "message"),
    [
        pytest.param(
            {"_target_": "torchmetrics.NoSuch"},
            "torchmetrics has no 'NoSuch'",
            marks=imports_torchmetrics,
        ),
        ({"name": "no_such"}, "no metrics factory has that name"),
        (3, "it names a factory"),
    ],
)
def test_an_unknown_metric_is_refused(node: Any, message: str) -> None:
    told = [str(problem) for problem in check_factories(recipe_of(metrics={"x": node}))]
    assert [one for one in told if one.startswith("metrics.x") and message in one]


@imports_torchmetrics
def test_a_metric_that_cannot_be_built_is_refused_before_the_start() -> None:
    node = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 1}
    recipe = recipe_of(metrics={"x": node}, step={"name": "gan"})
    with pytest.raises(ConfigError, match="Expected argument `num_classes` to be an integer"):
        build.check_steps([Examined(recipe, [], (), "config")])


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a torchmetrics\.Metric is required"):
        build.build_metrics(recipe_of(metrics={"x": {"_target_": "torch.nn.Identity"}}))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "Pairs.metric_inputs returned None: metrics take tensors"),
        ((torch.zeros(8, 2), torch.zeros(8)), r"metrics.mse: OwnMSE: it cannot take"),
    ],
)
def test_inputs_that_a_metric_cannot_take_are_refused(
    returned: Any, message: str, tmp_path: Path
) -> None:
    class Pairs(Still):
        def metric_inputs(self, output: Any, batch: Any) -> Any:
            return returned

    recipe = recipe_of(trainer__sanity_steps=1, metrics={"mse": {"name": "own_mse"}})
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, recipe, model=Scale(), objective=Pairs())
