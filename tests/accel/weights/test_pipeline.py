"""E1: pipeline stages compute what the model does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from accel.machine.errors import ConfigError
from accel.weights import pipeline as stages
from accel.weights.pipeline import balanced_split_points, check_split_points
from tests.accel.weights.models import Block, Tied


class Step(nn.Module):
    """A layer with a residual connection and a tensor that is made on the input's device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(x).relu() + torch.arange(4, device=x.device)
        return out


class Net(nn.Module):
    """A model of three steps: an input and an early activation are used late, or returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Step(), Step(), Step()
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("unused", torch.ones(4))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, factor: float = 1.0
    ) -> dict[str, torch.Tensor | None]:
        early = self.first(x)
        late = self.third(self.second(early) * mask) * mask + self.get_buffer("shift") * factor
        return {"out": late, "early": early, "nothing": None, "mean": late.mean(), "mask": mask}


EXAMPLE = ((torch.linspace(-1, 1, 8).reshape(2, 4),), {"mask": torch.ones(1, 4), "factor": 2.0})


def split(model: nn.Module, example: Any, *begins: str) -> tuple[stages.FlatModel, stages.Layout]:
    flat = stages.FlatModel(model, example)
    spec = {f"model.{name}": SplitPoint.BEGINNING for name in begins}
    with torch.no_grad(), stages.forwards_restored(flat.get_submodule(name) for name in spec):
        return flat, stages.Layout(pipeline(flat, flat.inputs.tensors, split_spec=spec).split_gm)


def built(layout: stages.Layout) -> list[stages.Stage]:
    parts = zip(layout.parts, layout.takes, layout.gives, strict=True)
    return [stages.as_stage(*one) for one in parts]


def chained(chain: Sequence[stages.Stage], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    carried = tuple(tensor.unsqueeze(0) for tensor in tensors)
    for stage in chain:
        carried = stage(*carried)
    return [tensor.squeeze(0) for tensor in carried]


@pytest.mark.parametrize("begins", [("second",), ("third",), ("second", "third")])
def test_stages_compute_what_the_model_does(begins: tuple[str, ...]) -> None:
    model = Net()
    flat, layout = split(model, EXAMPLE, *begins)
    assert len(layout.parts) == len(begins) + 1
    x, mask = torch.rand(2, 4), torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    found = chained(built(layout), (x, mask))
    expected = stages.Structure.of(model(x, mask, 2.0))
    assert all(map(torch.equal, found, expected.tensors))
    given = stages.Structure.of(flat.outputs((x, mask))).filled(found)
    assert given["nothing"] is None
    assert torch.equal(given["early"], found[1])


def test_a_stage_moves_with_what_it_makes() -> None:
    _, layout = split(Net(), EXAMPLE, "second")
    stage = built(layout)[1]
    stages.move(stage, torch.device("meta"))
    made = stage(*layout.carried[1])
    assert all(tensor.is_meta for tensor in made)
    assert all(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers()))


def test_tied_weights_are_in_each_stage_that_uses_them() -> None:
    model = Tied().eval()
    tokens = torch.tensor([[0, 1, 2, 3]]).T.expand(4, 4)[:, 0]
    _, layout = split(model, ((tokens,), {}), "head")
    expected = model(tokens)
    chain = built(layout)
    assert torch.allclose(chained(chain, (tokens,))[0], expected)
    stages.keep_only(model, chain[1], "model.")
    assert not model.head.weight.is_meta
    assert model.embedding.weight is model.head.weight


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
    found = balanced_split_points(model, names(model), num_stages, ())
    starts = tuple(map(int, found))
    assert len(starts) == num_stages - 1
    assert list(starts) == sorted({*starts} - {0})
    every = combinations(range(1, len(widths)), num_stages - 1)
    assert largest(widths, starts) == min(largest(widths, one) for one in every)


def test_classes_are_not_split() -> None:
    model = nn.Sequential(Block(), Block(), Block(), Block())
    assert balanced_split_points(model, names(model), 2, {"Block"}) == ["2"]
    assert balanced_split_points(model, names(model), 4, ["Block"]) == ["1", "2", "3"]
    with pytest.raises(ConfigError, match=r"calls 4 layers once.*Start fewer processes"):
        balanced_split_points(model, names(model), 5, {"Block"})


def test_split_points_of_a_user_are_checked() -> None:
    calls = ["", "embed", "blocks.0", "blocks.1", "norm", "norm"]
    check_split_points(calls, ["blocks.0", "blocks.1"], 3)
    with pytest.raises(ConfigError, match="3 processes take 3 stages, which 2 points split"):
        check_split_points(calls, ["blocks.0"], 3)
    with pytest.raises(ConfigError, match=r"calls 'block.1' 0 times.*mean 'blocks.1'"):
        check_split_points(calls, ["block.1"], 2)
    with pytest.raises(ConfigError, match="calls 'norm' 2 times"):
        check_split_points(calls, ["norm"], 2)
