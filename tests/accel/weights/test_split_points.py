"""Where a model is cut into pipeline stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel.machine.errors import ConfigError
from accel.weights import pipeline
from tests.accel.weights.models import Block, Tied


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, width, bias=False) for width in widths))


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def largest(widths: list[int], starts: tuple[int, ...]) -> int:
    edges = [0, *starts, len(widths)]
    return max(sum(widths[a:b]) for a, b in pairwise(edges))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_the_largest_stage_is_as_small_as_can_be(widths: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(widths)))
    model = layers(*widths)
    found = pipeline.balanced_split_points(model, names(model), num_stages, ())
    starts = tuple(map(int, found))
    assert len(starts) == num_stages - 1
    assert list(starts) == sorted({*starts} - {0})
    every = combinations(range(1, len(widths)), num_stages - 1)
    assert largest(widths, starts) == min(largest(widths, one) for one in every)


def test_layers_come_in_the_order_of_their_calls() -> None:
    model = layers(1, 1, 8)
    assert pipeline.balanced_split_points(model, ["2", "1", "0"], 2, ()) == ["1"]


def test_classes_are_not_split() -> None:
    model = nn.Sequential(Block(), Block(), Block(), Block())
    assert pipeline.balanced_split_points(model, names(model), 2, {"Block"}) == ["2"]
    assert pipeline.balanced_split_points(model, names(model), 4, ["Block"]) == ["1", "2", "3"]
    with pytest.raises(ConfigError, match=r"calls 4 layers once.*Start fewer processes"):
        pipeline.balanced_split_points(model, names(model), 5, {"Block"})


def test_weights_outside_layers_count_where_they_are() -> None:
    block = Block()  # its scale and shift belong to no layer of it
    model = nn.Sequential(nn.Linear(1, 8, bias=False), block, nn.Linear(1, 8, bias=False))
    calls = ["0", "1.norm", "1.linear", "2"]
    assert sum(pipeline._layer_bytes(model, calls, ()).values()) == sum(
        tensor.nbytes for tensor in (*model.parameters(), *model.buffers())
    )
    sizes = pipeline._layer_bytes(model, calls, ())
    assert sizes["0"] == 32 + 16  # and the scale, which comes before the layers of the block
    assert sizes["1.linear"] == 64 + 16 + 16  # and the shift, which comes after


def test_what_is_called_twice_begins_no_stage() -> None:
    model = layers(1, 1, 1)
    assert pipeline.balanced_split_points(model, ["0", "1", "1", "2"], 2, ()) == ["2"]


def test_stages_of_tied_weights_have_a_copy_each() -> None:
    sizes = pipeline._layer_bytes(Tied(), ["embedding", "block", "head"], {"Block"})
    assert sizes["embedding"] == sizes["head"] == 96


def test_split_points_of_a_user_are_checked() -> None:
    calls = ["", "embed", "blocks.0", "blocks.1", "norm", "norm"]
    pipeline.check_split_points(calls, ["blocks.0", "blocks.1"], 3)
    with pytest.raises(ConfigError, match="3 processes take 3 stages, which 2 points split"):
        pipeline.check_split_points(calls, ["blocks.0"], 3)
    with pytest.raises(ConfigError, match=r"calls 'block.1' 0 times.*mean 'blocks.1'"):
        pipeline.check_split_points(calls, ["block.1"], 2)
    with pytest.raises(ConfigError, match="calls 'norm' 2 times"):
        pipeline.check_split_points(calls, ["norm"], 2)
