"""C1, L1: the rows that `predict` writes, and several processes that share a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel.machine.errors import ConfigError
from runner.inference import predict
from runner.inference.predict import rows_of
from runner.inference.session import Request, alone
from runner.runs.json_files import read_json
from tests.runner.loops import Fit


def test_predictions_of_any_shape_become_rows() -> None:
    predicted = {
        "label": torch.tensor([1, 2]),
        "boxes": (torch.zeros(2, 1), torch.ones(2)),
        "nested": {"text": ["a", "b"]},
        "found": [{"at": torch.ones(3)}, {"at": np.zeros(1)}],
        "ragged": [torch.ones(1), torch.ones(0)],
    }
    row = {"boxes.0": [0.0], "boxes.1": 1.0}
    assert rows_of(None, predicted, 2) == [
        {"label": 1, **row, "nested.text": "a", "found": {"at": [1.0] * 3}, "ragged": [1.0]},
        {"label": 2, **row, "nested.text": "b", "found": {"at": [0.0]}, "ragged": []},
    ]
    assert rows_of(None, torch.tensor([0.5]), None) == [{"prediction": 0.5}]


@pytest.mark.parametrize(
    ("value", "num_samples", "message"),
    [
        (torch.ones(2, 3), 4, "Fit.predict returned shape [2, 3]: .* which has 4. Return"),
        ({"p": torch.ones(4), "m": torch.ones(())}, 4, "shape [] for 'm': "),
        ({}, 4, "a dict without values: "),
        ({"p": [object()] * 4}, 4, "a list for 'p': JSON has no type for object. "),
        (torch.ones(4, dtype=torch.complex64), 4, "JSON has no type for complex. "),
        ({"prediction": torch.ones(2), "b": torch.ones(3)}, None, "shape [3] for 'b'"),
    ],
)
def test_what_has_not_one_row_per_sample_is_refused(
    value: Any, num_samples: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as refused:
        rows_of(Fit(), value, num_samples)
    assert "Fit.predict returned " in str(refused.value)


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    output = tmp_path / "p.jsonl"
    request = Request(tmp_path, ("model.width=3",), ("test",), "last", output, num_processes=2)
    for written in (request, Request(tmp_path)):
        predict.write_request(tmp_path, written)
        assert predict.read_request(tmp_path) == written


@pytest.mark.parametrize(("rank", "written"), [("0", True), ("1", False), (None, True)])
def test_rank_0_writes_the_result(
    rank: str | None, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"metrics": {"test": {"loss": float("nan")}}, "step": 3}
    monkeypatch.setattr(predict, "evaluate", lambda request, watch: found)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
    predict.write_request(tmp_path, Request(tmp_path, num_processes=2))
    assert predict.run(tmp_path, alone) == 0
    result = read_json(tmp_path / predict.RESULT)
    assert str(result) == (str(found) if written else "{}")
