"""FSDP units of a model, and ignored modules (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.strategies.mesh.units import find_units
from tests.accel.strategies.training import WIDTH, Block, Model, assert_as_plain, build
from tests.helpers import run_distributed


def names_of(model: torch.nn.Module, plugin: dict[str, Any]) -> list[str]:
    """Return the names of what would be gathered as one, in the order of sharding."""
    names = {id(module): name for name, module in model.named_modules()}
    chosen = find_units(model, FullyShardedDataParallelPlugin(**plugin), set())
    return [names[id(unit)] for unit in chosen]


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
    model = WithIgnored()
    assert_as_plain(accelerator, model, WithIgnored(), accumulation)
    assert not isinstance(model.embed[1].linear.weight, DTensor)
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
