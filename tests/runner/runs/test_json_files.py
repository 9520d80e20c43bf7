"""R8, L1: metrics without doubles, the summary, and evaluations, of which nothing is lost."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runner.runs import json_files


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_lines_of_strict_json(tmp_path: Path) -> None:
    with contextlib.closing(json_files.MetricsFile(tmp_path)) as metrics:
        metrics.write({"step": 1, "loss": 0.5})
        assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]
        metrics.write({"step": 2, "loss": float("nan"), "norm": float("-inf")})
    metrics.close()
    assert read_metrics(tmp_path)[1] == {"step": 2, "loss": "NaN", "norm": "-Infinity"}
    assert float(read_metrics(tmp_path)[1]["norm"]) == float("-inf")


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    with contextlib.closing(json_files.MetricsFile(tmp_path)) as metrics:
        for step in range(1, 6):
            metrics.write({"step": step, "run": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    with contextlib.closing(json_files.MetricsFile(tmp_path, step=3)) as metrics:
        metrics.write({"step": 4, "run": 2})
    found = [(record["step"], record["run"]) for record in read_metrics(tmp_path)]
    assert found == [(1, 1), (2, 1), (3, 1), (4, 2)]
    with contextlib.closing(json_files.MetricsFile(tmp_path)):
        assert read_metrics(tmp_path) == []


def test_the_summary_is_written_in_one_piece(tmp_path: Path) -> None:
    content = {"best": float("inf"), "path": tmp_path, "steps": (1, 2)}
    json_files.write_json(tmp_path / json_files.SUMMARY, content)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {"best": "Infinity", "path": str(tmp_path), "steps": [1, 2]}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


# -- evaluations ---------------------------------------------------------------------------


def measured(step: int = 1, **splits: float) -> dict[str, Any]:
    metrics = {split: {"loss": value} for split, value in splits.items()}
    return {"checkpoint": "checkpoint_0", "step": step, "overrides": [], "metrics": metrics}


def test_splits_of_one_state_are_together_and_states_apart(tmp_path: Path) -> None:
    json_files.add_evaluation(tmp_path, measured(test=1.0))
    json_files.add_evaluation(tmp_path, measured(2, test=3.0))
    json_files.add_evaluation(tmp_path, measured(test=0.5, validation=2.0))
    assert [one["metrics"] for one in json_files.read_evaluations(tmp_path)] == [
        {"test": {"loss": 3.0}},
        {"test": {"loss": 0.5}, "validation": {"loss": 2.0}},
    ]


def test_a_damaged_file_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / json_files.EVALUATIONS).write_text('{"evalu')
    assert json_files.read_evaluations(tmp_path) == []
    json_files.add_evaluation(tmp_path, measured(test=1.0))
    assert len(json_files.read_evaluations(tmp_path)) == 1


def test_evaluations_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for found in [
            pool.submit(json_files.add_evaluation, tmp_path, measured(n)) for n in range(24)
        ]:
            found.result()
    assert sorted(one["step"] for one in json_files.read_evaluations(tmp_path)) == list(range(24))
