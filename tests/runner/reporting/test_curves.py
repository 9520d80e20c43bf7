"""L1: learning curves and groups over seeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.reporting import curves
from runner.reporting.curves import Curve
from runner.runs import discovery
from runner.runs.record import RunRecord
from tests.runner.written_runs import write_run, write_sweep


def curve(*values: float, first: int = 1) -> Curve:
    return Curve(np.arange(first, first + len(values), dtype=float), np.array(values))


def test_curves_are_read_by_split_and_metric(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", metrics=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "split": "train", "loss": "NaN"}\nnot json\n[1]\n{"step": 50, "sp')
    found = curves.read_curves(RunRecord(path))
    assert set(found) == {
        *("train/loss", "validation/loss"),
        *("train/samples_per_second", "validation/samples_per_second"),
    }
    assert found["train/loss"].steps.tolist() == [10, 20, 30, 40]
    assert math.isnan(found["train/loss"].values[-1])


def test_a_long_curve_is_thinned_to_means() -> None:
    thin = curves.thinned(curve(*range(100)), 10)
    assert len(thin.steps) == 10
    assert thin.values[0] == 4.5
    assert thin.steps[-1] == 100


def test_a_band_is_mean_and_range_as_far_as_each_run_has_been() -> None:
    found = curves.band([curve(1, 2, 3, 4), curve(3, 4)])
    assert found.mean.tolist() == [2, 3, 3, 4]
    assert (found.low[0], found.high[0], found.num_runs) == (1, 3, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_where_a_run_has_diverged_its_group_has_a_gap(value: float) -> None:
    found = curves.band([curve(1, 2, 3, 4), curve(1, value, 5, value)])
    for line in (found.mean, found.low, found.high):
        assert np.isnan(line).tolist() == [False, True, False, True]
    assert found.mean[2] == 4
    assert found.num_diverged == 1
    assert found.is_drawn
    assert not curves.band([curve(value, value)]).is_drawn


def test_runs_that_are_equal_but_for_the_seed_are_a_group(tmp_path: Path) -> None:
    runs = discovery.find_runs([write_sweep(tmp_path)])
    keys = curves.differing_keys(runs)
    assert sorted(keys) == ["model.width", "optimizer.lr"]
    groups = curves.group_by_seed(runs, keys)
    assert [len(group.runs) for group in groups] == [2] * 6
    assert groups[0].label == "model.width=16 optimizer.lr=0.001"
    assert curves.group_by_seed(runs[:1], [])[0].label == "digits"


def test_where_factories_differ_their_own_arguments_are_no_keys(tmp_path: Path) -> None:
    nodes: list[tuple[dict[str, Any], list[str]]] = [
        ({"name": "adamw", "lr": 0.1, "betas": [0.9, 0.999]}, []),
        ({"name": "sgd", "lr": 0.2, "momentum": 0.9}, ["optimizer=sgd", "optimizer.lr=0.2"]),
    ]
    runs = [
        RunRecord(write_run(tmp_path / f"{n}", {"optimizer": node}, overrides=overrides))
        for n, (node, overrides) in enumerate(nodes)
    ]
    keys = curves.differing_keys(runs)
    assert keys == ["optimizer.name", "optimizer.lr"]
    assert curves.settings(runs[1], keys) == "optimizer.name=sgd optimizer.lr=0.2"


def test_where_a_run_is_computed_is_no_cause_of_its_objective(tmp_path: Path) -> None:
    def swept(*recipes: dict[str, object]) -> list[str]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return curves.differing_keys(
            [RunRecord(write_run(folder / f"{n}", one)) for n, one in enumerate(recipes)]
        )

    place = {"distributed.max_restarts": 3, "distributed.rdzv_endpoint": "a:1", "submit.nodes": 2}
    processes = {"distributed.num_processes": 4, "dataloader.num_workers": 2}
    assert swept({"optimizer.lr": 0.5}, {**place, **processes}) == ["optimizer.lr"]
    assert swept({"seed": 1}, place) == []
    assert swept({"seed": 1}, {**place, **processes}) == [*processes]
