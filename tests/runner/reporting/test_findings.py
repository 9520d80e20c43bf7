"""What a report is about."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from runner.reporting import compare_runs, findings, run_table
from runner.run_dir import discovery, study
from runner.run_dir.record import RunRecord
from tests.runner.written_runs import write, write_failure, write_run, write_sweep


def test_a_sweep_is_read(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    (sweep / "0012").mkdir()
    failed = write_run(sweep / "0013", summary=False)
    write_failure(failed, 9e9)
    found = findings.find(discovery.find_runs([sweep]))
    assert findings.counted_statuses(found.runs) == "14 runs: 12 finished, 1 failed, 1 broken"
    assert found.judged[0].objective is not None
    assert found.judged[0].objective.value == min(
        run.objective.value for run in found.judged if run.objective
    )
    assert found.metrics == ["validation/loss", "train/loss"]
    bands = found.bands("validation/loss")
    assert len(bands) == 6
    assert next(iter(bands.values())).num_runs == 2


def test_mean_and_deviation_of_a_group(tmp_path: Path) -> None:
    values = (0.1, 0.3, math.nan)
    runs = [
        RunRecord(write_run(tmp_path / f"{n}", {"seed": n}, best=best))
        for n, best in enumerate(values)
    ]
    both = findings.spread(runs)
    assert (both.mean, both.deviation) == (pytest.approx(0.2), pytest.approx(math.sqrt(0.02)))
    assert both.seeds == "3 (1 not finite)"
    assert findings.spread(runs[2:]) == findings.Spread(None, None, "1 (1 not finite)")
    assert findings.spread(runs[:1]) == findings.Spread(0.1, None, "1")


def test_values_that_agree_in_six_digits_have_curves_of_their_own(tmp_path: Path) -> None:
    for number, (lr, seed) in enumerate([(0.01, 0), (0.01, 1), (0.010000002, 0), (0.003, 0)]):
        write_run(tmp_path / f"{number}", {"optimizer.lr": lr, "seed": seed}, best=number / 10)
    found = findings.find(discovery.find_runs([tmp_path]))
    labels = ["optimizer.lr=0.01", "optimizer.lr=0.010000002", "optimizer.lr=0.003"]
    assert [group.label for group in found.groups] == labels
    bands = found.bands("validation/loss")
    assert [(label, band.num_runs) for label, band in bands.items()] == [
        *zip(labels, (2, 1, 1), strict=True)
    ]


def test_a_seed_counts_once_with_its_newest_run(tmp_path: Path) -> None:
    for number, (seed, best) in enumerate(((0, 0.1), (0, 0.2), (1, 0.4))):
        write_run(tmp_path / f"{number}", {"seed": seed}, best=best, metrics=2 + number,
                  started=1e9 + number)  # fmt: skip
    unfinished = write_run(tmp_path / "3", {"seed": 1}, summary=False, metrics=9, started=2e9)
    alone = write_run(tmp_path / "4", {"seed": 2}, summary=False, started=3e9)
    write(alone / "checkpoints" / "best.json", {"metric": "loss", "mode": "min", "value": 9.0})
    found = findings.find(discovery.find_runs([tmp_path]))
    (group,) = found.groups
    assert (len(group.runs), findings.spread(group.runs).seeds) == (5, "2")
    assert findings.spread(group.runs).mean == pytest.approx(0.3)
    (band,) = found.bands("train/loss").values()
    assert band.num_runs == 2
    assert len(band.steps) == 4  # of the finished run of seed 1, not of that in `unfinished`
    assert unfinished.is_dir()
    assert findings.spread([RunRecord(alone)]) == findings.Spread(
        9.0, None, "1"
    )  # none of the group is finished


def test_runs_of_different_code_are_not_averaged(tmp_path: Path) -> None:
    git = {"sha": "a" * 40, "branch": "main", "dirty": False}
    changed = {**git, "dirty": True, "diff_sha256": "d" * 64}
    for number, state in enumerate((git, git, changed, {**git, "branch": "side"})):
        write_run(tmp_path / f"{number}", {"seed": number}, best=0.1 * number, git=state)
    write_run(tmp_path / "4", {"seed": 4}, git=git)
    earlier = {"git": {**git, "sha": "b" * 40}}
    (tmp_path / "4" / "environment.0001.json").write_text(json.dumps(earlier))
    found = findings.find(discovery.find_runs([tmp_path]))
    assert found.keys == ["code"]
    assert sorted(len(group.runs) for group in found.groups) == [1, 1, 3]
    assert {group.label[:13] for group in found.groups} == {"code=aaaaaaaa"}
    assert len({group.label for group in found.groups}) == 3
    assert any(" after bbbbbbbb-" in group.label for group in found.groups)


def test_runs_that_had_another_recipe_are_not_averaged(tmp_path: Path) -> None:
    for number in range(3):
        write_run(tmp_path / f"{number}", {"seed": number}, best=0.1 * number)
    for number, node, values in ((1, "optimizer", {"lr": 0.5}), (2, "trainer", {"log_every": 7})):
        earlier = yaml.safe_load((tmp_path / f"{number}" / "config.yaml").read_text())
        earlier[node] |= values
        (tmp_path / f"{number}" / "config.0001.yaml").write_text(yaml.safe_dump(earlier))
    found = findings.find(discovery.find_runs([tmp_path]))
    assert found.keys == ["earlier recipe"]
    labels = {group.label: len(group.runs) for group in found.groups}
    assert labels == {"earlier recipe=none": 2, "earlier recipe=optimizer.lr=0.5": 1}
    rows = compare_runs.compare(discovery.find_runs([tmp_path])[:2]).rows["recipe"]
    assert ("an earlier session (config.0001.yaml)", 1) in [
        (key, values.count("optimizer.lr=0.5")) for key, values in rows
    ]


def test_objectives_of_different_metrics_are_not_compared(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{n}", best=0.5 - n / 10) for n in range(3)]
    text = (folders[0] / "summary.json").read_text()
    text = text.replace('"metric": "loss", "mode": "min"', '"metric": "accuracy", "mode": "max"')
    (folders[0] / "summary.json").write_text(text)
    found = findings.find([RunRecord(folder) for folder in folders])
    assert [run.path.name for run in found.runs] == ["2", "1", "0"]
    assert [run.path.name for run in found.judged] == ["2", "1"]
    assert found.summary == (
        "3 runs: 3 finished; the objective is loss (min) of the validation; not compared with it: "
        "1 by accuracy (max)"
    )
    shown = [findings.shown_objective(run, found.judged_by) for run in found.runs]
    assert shown == ["0.3000", "0.4000", "accuracy 0.5000"]


def test_the_lowest_job_wins_a_tie_as_in_the_table_of_the_sweep(tmp_path: Path) -> None:
    runs = [
        RunRecord(write_run(tmp_path / f"{n:04}", best=0.5, started=1e9 + n)) for n in (19, 18, 20)
    ]
    found = findings.find(runs)
    assert [run.path.name for run in found.judged] == ["0018", "0019", "0020"]
    shown = run_table.in_order(run_table.newest_first(runs), "objective")
    assert [run.path.name for run in shown] == ["0018", "0019", "0020"]


def test_speed_and_memory(tmp_path: Path) -> None:
    run = RunRecord(write_run(tmp_path / "a"))
    assert (findings.throughput(run), findings.peak_memory(run)) == (1500.0, 3e8)
    running = RunRecord(write_run(tmp_path / "b", summary=False, metrics=2))
    assert (findings.throughput(running), findings.peak_memory(running)) == (1000.0, None)


def test_a_run_that_was_made_again_counts_once_for_the_importance(tmp_path: Path) -> None:
    write_sweep(tmp_path / "one")
    once = findings.find(discovery.find_runs([tmp_path])).importance
    write_sweep(tmp_path / "two")
    twice = findings.find(discovery.find_runs([tmp_path])).importance
    assert once.shares
    assert twice == once


def test_the_objective_of_a_search_is_told_where_it_is_another(tmp_path: Path) -> None:
    for metric, told in (
        ("best", ""),
        ("validation/loss", ""),
        ("test/loss", "the objective is loss (min) of the validation; the search judged by "
         "test/loss (min): see its results.csv"),
    ):  # fmt: skip
        sweep = tmp_path / metric.replace("/", "-")
        write_run(sweep / "0000", {"seed": 1})
        file = study.StudyFile("optuna.journal", "one", sweep.name, metrics=[metric], modes=["min"])
        file.write(sweep)
        found = findings.find(discovery.find_runs([sweep]))
        assert found.summary == "; ".join(["1 run: 1 finished", *([told] if told else [])])
