"""Inference over pipeline stages, one on each process (E1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import PartialState
from accel.inference import prepare_pippy
from accel.machine.errors import ConfigError
from tests.accel.weights.test_pipeline import Net, Step
from tests.helpers import run_distributed

X = torch.linspace(-2, 2, 28).reshape(7, 4)
MASK = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
THREE = pytest.param(3, marks=pytest.mark.slow)


def blocks(number: int = 4) -> nn.Sequential:
    """Return blocks of random weights, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(*(Step() for _ in range(number)))


def kept(model: nn.Module) -> list[str]:
    """Return the names of the submodules of which this process has the weights."""
    names = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    return sorted({name.split(".")[0] for name in names})


def refusal(*args: Any, **kwargs: Any) -> str:
    try:
        prepare_pippy(*args, **kwargs)
    except ConfigError as error:
        return str(error)
    return ""


# -- one process ---------------------------------------------------------------------------


def test_one_process_has_one_stage() -> None:
    PartialState(cpu=True)
    model = blocks()
    assert prepare_pippy(model, example_args=(X[:2],)) is model
    assert not model.training
    assert torch.equal(model(X), blocks()(X))
    assert accel.prepare_pippy is prepare_pippy


def test_requests_that_contradict_are_refused_together() -> None:
    PartialState(cpu=True)
    message = refusal(blocks().to("meta"), split_points=["1", "2"], num_chunks=0)
    assert "split_points=['1', '2']: one process has one stage. Start 3 processes." in message
    assert "num_chunks=0: it is at least 1" in message
    assert "0.linear.weight is on the meta device: stages have weights" in message
    assert "Pass ['1']" in refusal(blocks(), split_points="1")


# -- several processes -----------------------------------------------------------------------


def outputs_by_rank() -> tuple[Any, list[str], list[tuple[int, ...]]]:
    """Call a model with more samples than fit, with fewer, and with other inputs elsewhere."""
    state = PartialState(cpu=True)
    torch.manual_seed(0)
    model = prepare_pippy(Net().train(), example_args=(X[:2], torch.ones(1, 4)))
    found = model(X, MASK) if state.is_main_process else model()
    single = model(X[:1], MASK)
    if not state.is_last_process:
        return (found, single), kept(model), []
    torch.manual_seed(0)
    own = Net().eval()
    for given, x in ((found, X), (single, X[:1])):
        expected = own(x, MASK)
        torch.testing.assert_close(given["out"], expected["out"])
        torch.testing.assert_close(given["early"], expected["early"])
        assert given["nothing"] is None
        assert not given["out"].requires_grad
    shapes = [tuple(found["mean"].shape), tuple(single["mean"].shape), tuple(found["mask"].shape)]
    return None, kept(model), shapes


@pytest.mark.parametrize("size", [2, THREE])
def test_outputs_are_those_of_the_model(size: int) -> None:
    *others, (_, last, shapes) = run_distributed(outputs_by_rank, size)
    assert all(found == (None, None) for found, _, _ in others)
    stages = [names for _, names, _ in others] + [last]
    assert sorted(name for names in stages for name in names) == ["first", "second", "third"]
    assert shapes == [(4,), (1,), (4, 1, 4)]  # stacked: they have no batch dimension


def options() -> dict[str, Any]:
    """Prepare a model in several ways."""
    PartialState(cpu=True)
    named = prepare_pippy(blocks(), split_points=["3"], example_args=(X[:2],))
    uneven = nn.Sequential(blocks(3), blocks(1))
    as_one = prepare_pippy(
        nn.Sequential(blocks(3), blocks(1)),
        no_split_module_classes=["Sequential"],
        example_args=(X[:2],),
    )
    split = prepare_pippy(uneven, example_args=(X[:2],))
    by_name = prepare_pippy(Net(), example_kwargs={"x": X[:2], "mask": MASK}, gather_output=True)
    gathered = by_name(x=X, mask=MASK)
    assert torch.equal(gathered["early"], by_name(mask=MASK, x=X)["early"])
    rounds = prepare_pippy(blocks(), example_args=(X[:2],), num_chunks=3, gather_output=True)
    torch.testing.assert_close(rounds(X), blocks().eval()(X))
    forward: Any = rounds.forward
    return {
        "named": kept(named),
        "split": sum(not parameter.is_meta for parameter in split.parameters()),
        "as_one": sum(not parameter.is_meta for parameter in as_one.parameters()),
        "gathered": [list(gathered[name].shape) for name in ("out", "early", "mean")],
        "rounds": sorted(forward.schedules),
    }


def test_options() -> None:
    first, last = run_distributed(options, 2)
    assert (first["named"], last["named"]) == (["0", "1", "2"], ["3"])
    assert (first["split"], last["split"]) == (4, 4)
    assert (first["as_one"], last["as_one"]) == (6, 2)
    assert first["gathered"] == last["gathered"] == [[7, 4], [7, 4], [4]]
    assert first["rounds"] == last["rounds"] == [1, 3]


class Branching(nn.Module):
    """A model whose forward pass depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Step(), Step()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.first(x)
        return self.second(first) if first.sum() > 0 else first


def refusals() -> list[str]:
    """Prepare and call models wrongly; every process gets every message."""
    state = PartialState(cpu=True)
    found = [
        refusal(blocks()),
        refusal(blocks(), split_points=["1", "2"], example_args=(X[:2],)),
        refusal(blocks(), split_points=["0"], example_args=(X[:2],)),
        refusal(Branching(), example_args=(X[:2],)),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(refusal(blocks(), example_args=(X[:2],)))
    model = prepare_pippy(blocks(), example_args=(X[:2],))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast is on"):
        model(X)
    for wrong in ((X[:, :3],), (X.double(),), (X, X), (X[:0],), (1.0,), ([X],)):
        try:
            model(*(wrong if state.is_main_process else ()))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_what_does_not_fit_is_refused_on_every_process() -> None:
    first, last = run_distributed(refusals, 2)
    assert first == last
    without, many, nothing, branching, autocast, shape, dtype, number, empty, other, nested = first
    assert "the first tensor of the example has the micro-batch as dim 0" in without
    assert "2 processes take 2 stages, which 1 points split" in many
    assert "makes 1 stages of it for 2 processes" in nothing
    assert "cannot trace its forward pass as one graph" in branching
    assert "autocast is on" in autocast
    assert "input 0: [7, 3] float32: the example's is [2, 4] float32" in shape
    assert "input 0: [7, 4] float64" in dtype
    assert "too many positional arguments" in number
    assert "an empty batch" in empty
    assert "input 0: 1.0" in other
    assert "inputs ['[7, 4] float32']: they are nested like the example's" in nested
