"""FSDP units of a model, their dtypes, and ignored modules (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import ConfigError
from accel.strategies.mesh.units import find_units, split_by_dtype
from tests.accel.strategies.training import (
    WIDTH,
    Block,
    Model,
    build,
    difference,
    largest,
    plain,
    train,
)
from tests.helpers import run_distributed

CLOSE = 1e-5


def names_of(model: torch.nn.Module, plugin: dict[str, Any]) -> list[str]:
    """Return the names of what would be gathered as one, in the order of sharding."""
    names = {id(module): name for name, module in model.named_modules()}
    chosen = find_units(model, FullyShardedDataParallelPlugin(**plugin), set())
    return [names[id(unit)] for unit in split_by_dtype(model, chosen, set())]


def wrap_linear(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, torch.nn.Linear)


INNER = ["blocks.1.down", "blocks.1.up", "blocks.0.down", "blocks.0.up"]
BLOCKS = ["blocks.1", "blocks.0"]


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        # The inner layers have 180 and 168 parameters, a block 364, the model 829.
        ({"min_num_params": 100}, INNER),
        ({"min_num_params": 175}, ["blocks.1.up", "blocks.1", "blocks.0.up", "blocks.0"]),
        ({"min_num_params": 300}, BLOCKS),
        ({"min_num_params": 400, "auto_wrap_policy": "size_based_wrap"}, []),
        ({"min_num_params": 100, "transformer_cls_names_to_wrap": ["Block"]}, BLOCKS),
        ({}, BLOCKS),
        ({"auto_wrap_policy": "no_wrap"}, []),
        # The head shares its weight, so it is no unit.
        ({"auto_wrap_policy": wrap_linear}, INNER),
        ({"auto_wrap_policy": f"{__name__}.wrap_linear"}, INNER),
        ({"auto_wrap_policy": ModuleWrapPolicy({Block})}, BLOCKS),
        ({"auto_wrap_policy": CustomPolicy(lambda module: isinstance(module, Block))}, BLOCKS),
    ],
)
def test_units_are_those_that_the_plugin_names(plugin: Any, expected: list[str]) -> None:
    assert names_of(Model(), plugin) == expected


class Scaled(torch.nn.Module):
    """A parameter in fp64 beside a layer in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.gamma = torch.nn.Parameter(torch.full((6,), 0.5, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + (self.inner(inputs) * self.gamma).float()


class Mixed(torch.nn.Module):
    """A layer and a parameter in fp64 among others in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 6)
        self.scaled = Scaled()
        self.second = torch.nn.Linear(6, 4).double()
        self.beside = torch.nn.Linear(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.scaled(self.first(inputs))
        return self.second(hidden.double()) + self.beside(inputs)


def check_dtypes_and_ignored() -> None:
    # The rarer dtype above the common one, within a unit; and as the unit's own.
    for plugin in ({}, {"transformer_cls_names_to_wrap": ["Scaled"]}):
        accelerator = build(fsdp={"ignored_modules": "bes.*", **plugin})
        model, expected = Mixed(), Mixed()
        for module in (model, expected):
            module.beside.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert not isinstance(model.beside.weight, DTensor)
        assert isinstance(model.second.weight, DTensor)
        assert model.second.weight.dtype == torch.float64
        check_steps(accelerator, model, optimizer, expected)
        state = accelerator.get_state_dict(model)
        assert difference(state, expected.state_dict()) < CLOSE
        assert state["second.weight"].dtype == torch.float64
        accelerator.end_training()


def check_steps(accelerator: Any, model: Any, optimizer: Any, expected: Mixed) -> None:
    other = torch.optim.AdamW(expected.parameters(), lr=0.1)
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        accelerator.backward(model(inputs).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        expected(inputs).square().mean().backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        other.step()
        other.zero_grad()
        assert abs(norm.item() - plain_norm.item()) < CLOSE


def test_several_dtypes_and_ignored_modules() -> None:
    run_distributed(check_dtypes_and_ignored, 2)


def test_each_dtype_of_a_unit_is_a_unit() -> None:
    model = Mixed()
    assert names_of(model, {}) == ["scaled.inner", "scaled", "second"]
    by_class = {"transformer_cls_names_to_wrap": ["Mixed", "Scaled"]}
    assert names_of(torch.nn.Sequential(model), by_class) == [
        *("0.scaled.inner", "0.scaled", "0.second", "0")
    ]
    model.gain = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))  # all others are apart
    assert names_of(model, {}) == ["first", "scaled.inner", "scaled", "second", "beside"]
    model.first.weight = torch.nn.Parameter(model.first.weight.double())
    with pytest.raises(ConfigError, match=r"Linear with parameters of torch.float32, "):
        names_of(model, {})


def test_what_is_tied_is_no_unit_of_its_own() -> None:
    model = Model(frozen=False)
    model.shift.data = model.shift.data.double()
    with pytest.raises(ConfigError, match=r"Embedding of torch.float32 in a unit of torch.float64"):
        names_of(model, {})


class Beside(torch.nn.Module):
    """A trained module to be ignored: a used layer, one that nobody uses, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.unused = torch.nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden) * self.scale


class WithIgnored(Model):
    """The model, and a trained module between embedding and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Sequential(self.embed, Beside())
        self.head.weight = self.embed[0].weight


def check_ignored_are_trained(replicas: int, accumulation: int) -> None:
    plugin = {"ignored_modules": "embed.1", "dp_replicate_size": replicas}
    accelerator = build(fsdp=plugin, gradient_accumulation_steps=accumulation)
    model, expected = WithIgnored(), plain(WithIgnored(), accumulation)
    losses, norms, weights = train(accelerator, model)
    assert not isinstance(model.embed[1].linear.weight, DTensor)
    assert largest(losses, expected[0]) < CLOSE
    assert largest(norms, expected[1]) < CLOSE  # alike on all ranks, and so the factors
    assert difference(weights, expected[2]) < CLOSE
    assert model.embed[1].unused.weight.grad is None
    accelerator.end_training()
    check_some_ranks_use_it()


def check_some_ranks_use_it() -> None:
    accelerator = build(fsdp={"ignored_modules": "embed.1"})
    model = accelerator.prepare(WithIgnored())
    beside, rank = model.embed[1], accelerator.process_index
    total = model(torch.zeros(1, 2, dtype=torch.long)).sum()
    if rank == 1:
        total = total + beside.unused(torch.ones(1, 2)).sum()
    for times in (1, 2):  # what was averaged once may be added to
        accelerator.backward(total, retain_graph=True)
        share = times / accelerator.num_processes
        assert torch.equal(beside.unused.weight.grad, torch.full((2, 2), share))
    accelerator.end_training()


@pytest.mark.parametrize(("world_size", "replicas", "accumulation"), [(2, 1, 2), (4, 2, 1)])
def test_ignored_modules_are_trained_alike(
    world_size: int, replicas: int, accumulation: int
) -> None:
    run_distributed(check_ignored_are_trained, world_size, replicas, accumulation)
