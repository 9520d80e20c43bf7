"""Errors of the user's data that loaders would take for something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.data import user_code
from runner.data.user_code import Collate, DataError, UserCode, collate


def test_the_end_of_an_iterator_is_an_error_and_others_stay() -> None:
    with pytest.raises(DataError, match="__getitem__ raised StopIteration"):
        with UserCode("__getitem__"):
            next(iter(()))
    with pytest.raises(KeyError), UserCode("__getitem__"):
        raise KeyError(3)


def test_an_exit_in_a_worker_is_an_error_that_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit), UserCode("__getitem__"):
        raise SystemExit(3)
    monkeypatch.setattr(user_code, "get_worker_info", lambda: "a worker")
    with pytest.raises(DataError, match="__getitem__ raised SystemExit: 3"):
        with UserCode("__getitem__"):
            raise SystemExit(3)
    with pytest.raises(KeyError), UserCode("__getitem__"):
        raise KeyError(3)


def test_a_function_that_joins_samples_is_called_with_them() -> None:
    assert Collate(sum)([1, 2]) == 3
    with pytest.raises(DataError, match="collate_fn raised StopIteration"):
        Collate(lambda samples: next(iter(())))([1])


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.ones(3)],
        [{"a": 1}, {"b": 1}],
        [(1, 2), (1,)],
        [object(), object()],
    ],
)
def test_samples_that_do_not_agree_are_refused(samples: list[Any]) -> None:
    with pytest.raises(DataError, match="samples cannot be collated"):
        collate(samples)
