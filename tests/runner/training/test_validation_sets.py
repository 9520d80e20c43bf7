"""R1, C1: several named validation sets are measured by name, and a monitor names one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel.machine.errors import ConfigError
from runner.data.datasets import Data
from runner.training.factory_results import check
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.loops import NUM_TRAIN, Points, Spy, recipe_of, records, run


def named() -> Data:
    return Data(
        Points(NUM_TRAIN),
        {"near": Points(13), "far": Points(7, offset=1)},
        {"near": Points(9), "far": Points(5)},
    )


def train(run_dir: str) -> list[dict[str, Any]]:
    recipe = recipe_of(trainer__epochs=2, checkpoint__monitor="far/loss", trainer__sanity_steps=1)
    run(Path(run_dir), recipe, data=named())
    loops.forget()
    return records(Path(run_dir), "validation")


def test_each_is_measured_once_on_any_number_of_processes(tmp_path: Path) -> None:
    one = train(str(tmp_path / "one"))
    assert [(record["near/count"], record["far/count"]) for record in one] == [(13, 7)] * 2
    two = run_distributed(train, 2, str(tmp_path / "two"))[0]
    for name in ("near/loss", "far/loss"):
        torch.testing.assert_close(
            [r[name] for r in one], [r[name] for r in two], rtol=1e-4, atol=0
        )


def test_the_monitor_names_one(tmp_path: Path) -> None:
    recipe = recipe_of(trainer__epochs=2, checkpoint__monitor="far/loss")
    summary = run(tmp_path, recipe, data=named())
    best = min(records(tmp_path, "validation"), key=lambda record: record["far/loss"])
    assert (summary["best"]["metric"], summary["best"]["value"]) == ("far/loss", best["far/loss"])
    assert summary["metrics"]["test"].keys() == {"near/loss", "near/count", "far/loss", "far/count"}
    assert summary["data"]["validation/near"] == 13


def test_without_a_name_the_monitor_is_refused_before_a_step(tmp_path: Path) -> None:
    spy = Spy()
    with pytest.raises(ConfigError, match="near/loss, near/count, far/loss, far/count"):
        run(tmp_path, recipe_of(trainer__sanity_steps=1), data=named(), callbacks={"spy": spy})
    assert spy.events == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data({"a": Points(3)}), "Give one torch.utils.data.Dataset"),  # type: ignore[arg-type]
        (Data(Points(3), {"a": None}), r"validation\['a'\] None"),  # type: ignore[dict-item]
        (Data(Points(3), {"a": Points(0)}), "it is empty"),
    ],
)
def test_what_a_factory_returns_is_checked(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("data", "data=points", data)
