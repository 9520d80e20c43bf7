"""What a user's methods may return, and rows of predictions (C1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accel.machine.errors import ConfigError
from runner.training import return_checks
from tests.runner.loops import Fit


def test_predictions_of_any_shape_become_rows() -> None:
    predicted = {
        "label": torch.tensor([1, 2]),
        "boxes": [torch.zeros(2, 1), torch.ones(2)],
        "nested": {"text": ["a", "b"]},
        "found": [{"at": torch.ones(3)}, {"at": np.zeros(1)}],
        "ragged": [torch.ones(1), torch.ones(0)],
    }
    row = {"boxes.0": [0.0], "boxes.1": 1.0}
    assert return_checks.rows(None, predicted, 2) == [
        {"label": 1, **row, "nested.text": "a", "found": {"at": [1.0] * 3}, "ragged": [1.0]},
        {"label": 2, **row, "nested.text": "b", "found": {"at": [0.0]}, "ragged": []},
    ]
    assert return_checks.rows(None, torch.tensor([0.5]), None) == [{"prediction": 0.5}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 3), "Fit.predict returned a Tensor of shape [2, 3]: .* which has 4. Return"),
        ({"p": torch.ones(4), "m": torch.ones(())}, "a Tensor of shape [] for 'm': "),
        ({}, "a dict without values: "),
        ({"p": [object()] * 4}, "a list of 4 for 'p': JSON has no type for an object. "),
        (torch.ones(4, dtype=torch.complex64), "JSON has no type for a complex. "),
        ({"other": torch.ones(4)}, "values for other: the batches before gave prediction. "),
    ],
)
def test_what_has_not_one_row_per_sample_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as refused:
        return_checks.rows(Fit(), value, 4, ["prediction"])
    assert "Fit.predict returned " in str(refused.value)


def test_columns_of_different_lengths_are_refused_where_the_batch_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"a Tensor of shape \[3\] for 'b'"):
        return_checks.rows(Fit(), {"a": torch.ones(2), "b": torch.ones(3)}, None)
