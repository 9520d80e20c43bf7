"""Nested data keeps its types; parts of data are fair and complete (E1)."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.machine import tree
from accel.machine.errors import ConfigError

Pair = namedtuple("Pair", ["first", "second"])


class Encoding(UserDict[str, Any]):
    """Like transformers' `BatchEncoding`: a mapping that is no dict."""

    def __init__(self, data: Any = None) -> None:
        super().__init__(data)


@dataclass
class Output(OrderedDict[str, Any]):
    """Like transformers' `ModelOutput`: a mapping with fields."""

    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class MyList(list[Any]):
    """A list of another name."""


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_structure_and_types_stay() -> None:
    one = torch.ones(1)
    data = {
        "list": [one, (one, "text")],
        "pair": Pair(one, 3),
        "encoding": Encoding({"ids": one}),
        "ordered": OrderedDict(a=one),
        "default": defaultdict(list, a=one),
        "output": Output(logits=one),
        "mine": MyList([one]),
        "none": None,
    }
    result = tree.recursively_apply(double, data)
    assert result["list"] == [torch.full((1,), 2.0), (torch.full((1,), 2.0), "text")]
    assert isinstance(result["pair"], Pair)
    assert result["pair"].first.item() == 2
    assert isinstance(result["encoding"], Encoding)
    assert result["encoding"]["ids"].item() == 2
    assert isinstance(result["ordered"], OrderedDict)
    assert result["default"].default_factory is list
    assert isinstance(result["output"], Output)
    assert result["output"]["logits"].item() == 2
    assert isinstance(result["mine"], MyList)
    assert result["none"] is None
    assert one.item() == 1


def test_arguments_are_handed_on() -> None:
    result = tree.recursively_apply(torch.add, [torch.ones(1)], 2, alpha=3)
    assert result[0].item() == 7


def test_other_types_may_be_an_error() -> None:
    with pytest.raises(TypeError, match=r"str is not supported.*is_tensor"):
        tree.recursively_apply(double, {"a": "text"}, error_on_other_type=True)


def test_other_leaves_by_test() -> None:
    result = tree.recursively_apply(len, ["ab", 3], test_type=lambda leaf: isinstance(leaf, str))
    assert result == [2, 3]


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_parts_are_complete_in_order_and_even(data: list[int], size: int) -> None:
    parts = [tree.split(data, rank, size) for rank in range(size)]
    assert [item for part in parts for item in part] == data
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.lists(st.integers(), min_size=1, max_size=20), st.integers(1, 6))
def test_padded_parts_have_one_length(data: list[int], size: int) -> None:
    padded = [tree.split(data, rank, size, padding=True) for rank in range(size)]
    plain = [tree.split(data, rank, size) for rank in range(size)]
    assert {len(part) for part in padded} == {-(-len(data) // size)}
    for with_padding, without in zip(padded, plain, strict=True):
        assert with_padding[: len(without)] == without
        assert set(with_padding[len(without) :]) <= {(without or data)[-1]}


def test_what_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="all values of a dict have one length"):
        tree.split({"a": [1], "b": [1, 2]}, 0, 2)
    with pytest.raises(ConfigError, match="Make a list of it"):
        tree.split({1, 2}, 0, 2)
    with pytest.raises(ConfigError, match="int"):
        tree.split(5, 0, 2)
    with pytest.raises(ConfigError, match="str"):  # a prompt, not its letters
        tree.split({"prompt": "text"}, 0, 2)


def test_dicts_are_merged_in_place() -> None:
    source = {"a": {"b": 1, "c": {"e": 2}}, "x": 1, "new": {"y": 3}}
    destination: dict[str, Any] = {"a": {"b": 0, "d": 4, "c": 9}, "z": 6}
    assert tree.merge_dicts(source, destination) is destination
    assert destination == {"a": {"b": 1, "c": {"e": 2}, "d": 4}, "x": 1, "new": {"y": 3}, "z": 6}
    destination["new"]["y"] = 0
    assert source["new"] == {"y": 3}
