"""The importance of keys is that of the function that made the objective."""

from __future__ import annotations

from pathlib import Path

from runner.reporting.importance import importance
from runner.run_dir import discovery
from tests.runner.written_runs import write_search, write_sweep


def test_the_key_that_matters_is_the_most_important(tmp_path: Path) -> None:
    runs = discovery.find_runs([write_sweep(tmp_path, (1e-4, 3e-4, 1e-3, 3e-3))])
    found = importance(runs, ["model.width", "optimizer.lr", "model.name"])
    assert next(iter(found.shares)) == "optimizer.lr"
    assert found.shares["optimizer.lr"] > 0.8
    assert found.shares["model.name"] == 0
    assert abs(sum(found.shares.values()) - 1) < 1e-9
    assert found.fit > 0.5
    assert importance(runs, ["model.width", "optimizer.lr"]) == importance(
        runs, ["model.width", "optimizer.lr"]
    )


def test_a_few_runs_tell_nothing_and_it_says_so(tmp_path: Path) -> None:
    runs = discovery.find_runs([write_sweep(tmp_path)])
    assert "at least 8 runs" in importance(runs[:5], ["optimizer.lr"]).reason
    assert "at least 8 runs" in importance(runs, []).reason


def test_a_group_and_a_key_that_some_runs_lack(tmp_path: Path) -> None:
    found = importance(
        discovery.find_runs([write_search(tmp_path)]),
        ["optimizer", "optimizer.lr", "optimizer.momentum"],
    )
    assert next(iter(found.shares)) == "optimizer.momentum"
    assert found.shares["optimizer"] > 0
