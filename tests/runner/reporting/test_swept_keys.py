"""L1: the keys of runs are those that were swept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.reporting import curves, html_page, swept_keys
from runner.runs import discovery
from runner.runs.record import MISSING, RunRecord
from tests.runner.written_runs import write_run, write_search

KEYS = ["optimizer", "optimizer.lr", "optimizer.momentum"]
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.999]}
SGD: dict[str, Any] = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}


def run(path: Path, values: dict[str, Any], *overrides: str) -> RunRecord:
    return RunRecord(write_run(path, values, overrides=list(overrides)))


def test_a_swept_group_is_one_key(tmp_path: Path) -> None:
    runs = discovery.find_runs([write_search(tmp_path)])
    assert swept_keys.find(runs) == KEYS
    assert [swept_keys.value(one, "optimizer") for one in runs[:2]] == ["adamw", "sgd"]
    assert swept_keys.value(runs[0], "optimizer.momentum") is MISSING
    found = html_page.read(runs)
    assert (found.keys, len(found.groups)) == (KEYS, 6)
    assert (
        curves.settings(runs[1], KEYS) == "optimizer=sgd optimizer.lr=0.01 optimizer.momentum=0.1"
    )


def test_a_group_without_a_node_of_its_own_is_a_key_of_its_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "one"
    for number, width in enumerate((16, 32)):
        values = {"model.width": width, "trainer.max_steps": width}
        run(sweep / f"{number:04}", values, f"experiment=wide{width}")
    (sweep / "sweep.json").write_text("{}")
    (sweep / "journal.jsonl").write_text("")
    runs = discovery.find_runs([sweep])
    assert swept_keys.find(runs) == ["experiment"]
    assert swept_keys.value(runs[0], "experiment") == "wide16"
    # Of runs that no sweep has made, another cause is possible.
    (sweep / "sweep.json").unlink()
    (sweep / "journal.jsonl").unlink()
    found = swept_keys.find(discovery.find_runs([sweep]))
    assert set(found) == {"experiment", "model.width", "trainer.max_steps"}


def test_what_a_sweep_has_not_set_and_does_not_explain_is_a_key(tmp_path: Path) -> None:
    sweep = tmp_path / "one"
    for number, (rate, width) in enumerate(((0.1, 16), (0.2, 16), (0.1, 32))):
        values = {"optimizer.lr": rate, "model.width": width}
        run(sweep / f"{number:04}", values, f"optimizer.lr={rate}")
    (sweep / "sweep.json").write_text("{}")
    (sweep / "journal.jsonl").write_text("")
    found = swept_keys.find(discovery.find_runs([sweep]))
    assert sorted(found) == ["model.width", "optimizer.lr"]
