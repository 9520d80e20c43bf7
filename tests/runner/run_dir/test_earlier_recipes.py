"""An earlier recipe counts where it has computed something else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from runner.run_dir import earlier_recipes

NOW = {
    "optimizer": {"name": "adamw", "lr": 0.1},
    "fsdp": None,
    "trainer": {"epochs": 8, "max_time": None, "log_every": 5},
    "distributed": {"num_processes": 2},
    "model": {"limit": math.nan},
    "precision": {"mode": "no"},
}


@pytest.mark.parametrize(
    ("then", "text"),
    [
        ({}, ""),
        ({"distributed": {"num_processes": 4}}, ""),  # where it is computed
        ({"trainer": {"epochs": 8, "max_time": "1h", "log_every": 50}}, ""),  # one session of it
        ({"trainer": {"epochs": 8, "max_time": None}}, ""),  # a key of a newer version
        ({"optimizer": {"name": "adamw", "lr": 0.2}}, "optimizer.lr=0.2"),
        ({"optimizer": {"name": "adamw", "lr": 0.1, "eps": 1.0}}, "optimizer.eps=1.0"),
        ({"trainer": {"epochs": 4}, "fsdp": {"name": "x"}}, "fsdp={725f14b0} trainer.epochs=4"),
        ({"model": {}}, "no model.limit"),  # given as the run was resumed
        ({"precision": {"mode": "no", "fp8": None}}, ""),  # a key of an older version
    ],
)
def test_what_another_recipe_had(tmp_path: Path, then: dict[str, object], text: str) -> None:
    (tmp_path / "config.0001.yaml").write_text(yaml.safe_dump({**NOW, **then}))
    expected = {"config.0001.yaml": text} if text else {}
    assert earlier_recipes.changes(tmp_path, NOW) == expected


def test_a_damaged_recipe_is_unknown(tmp_path: Path) -> None:
    assert earlier_recipes.changes(tmp_path / "gone", NOW) == {}
    for number, text in enumerate(("a: [", "- 1")):
        (tmp_path / f"config.000{number}.yaml").write_text(text)
    found = earlier_recipes.changes(tmp_path, NOW)
    assert list(found.values()) == [earlier_recipes.UNKNOWN] * 2
