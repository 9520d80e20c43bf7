"""Tables of the ranks' first samples, compared without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.data.stream_digests import FirstRound, difference, is_floating


def table(*samples: Any, draws: bool = False) -> list[int]:
    noted = FirstRound()
    noted.begin()
    if draws:
        torch.rand(1)
    noted.note(samples)
    return noted.table.tolist()


def images(*numbers: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(number)) for number in numbers]


def test_equal_samples_are_one_stream() -> None:
    assert difference([table(1, 2, 3), table(1, 2, 3)]) is None
    assert difference([table({"x": 1, "y": [2]}), table({"x": 1, "y": [2]})]) is None


def test_other_samples_differ() -> None:
    found = difference([table(1, 2, 3, 4), table(5, 6, 7, 8)])
    assert found == "4 of the 4 samples compared at first differ between ranks"


def test_other_numbers_of_samples_differ() -> None:
    assert "2 and 1 samples" in str(difference([table(1, 2), table(1)]))


def test_nothing_is_known_before_a_round() -> None:
    assert difference([table(1), FirstRound().table.tolist()]) is None


def test_a_label_that_agrees_shows_one_augmented_stream() -> None:
    first = table(*zip(images(1, 2), (0, 1), strict=True))
    other = table(*zip(images(3, 4), (0, 1), strict=True))
    assert difference([first, other]) is None


@pytest.mark.parametrize(("draws", "differs"), [(True, False), (False, True)])
def test_lone_tensors_may_be_augmented_where_random_numbers_were_drawn(
    draws: bool, differs: bool
) -> None:
    first, other = table(*images(1, 2), draws=draws), table(*images(3, 4), draws=draws)
    assert (difference([first, other]) is not None) is differs


def test_a_sample_that_moved_shows_another_order() -> None:
    first, other = table(*images(1, 2), draws=True), table(*images(2, 1), draws=True)
    assert difference([first, other]) is not None


def test_floating_values_are_known() -> None:
    assert is_floating(1.5)
    assert is_floating(torch.ones(1))
    assert not is_floating(torch.tensor(1))
