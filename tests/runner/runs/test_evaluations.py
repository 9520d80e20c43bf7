"""eval.json: nothing measured is lost (L1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runner.runs import evaluations


def measured(step: int = 1, **splits: float) -> dict[str, Any]:
    metrics = {split: {"loss": value} for split, value in splits.items()}
    return {"checkpoint": "checkpoint_0", "step": step, "overrides": [], "metrics": metrics}


def test_splits_of_one_state_are_together_and_states_apart(tmp_path: Path) -> None:
    evaluations.add(tmp_path, measured(test=1.0))
    evaluations.add(tmp_path, measured(2, test=3.0))
    evaluations.add(tmp_path, measured(test=0.5, validation=2.0))
    assert [one["metrics"] for one in evaluations.read(tmp_path)] == [
        {"test": {"loss": 3.0}},
        {"test": {"loss": 0.5}, "validation": {"loss": 2.0}},
    ]


def test_a_damaged_file_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / evaluations.EVAL).write_text('{"evalu')
    assert evaluations.read(tmp_path) == []
    evaluations.add(tmp_path, measured(test=1.0))
    assert len(evaluations.read(tmp_path)) == 1


def test_evaluations_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for found in [pool.submit(evaluations.add, tmp_path, measured(n)) for n in range(24)]:
            found.result()
    assert sorted(one["step"] for one in evaluations.read(tmp_path)) == list(range(24))
