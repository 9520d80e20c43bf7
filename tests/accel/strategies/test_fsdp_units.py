"""What FSDP2 gathers as one, and what it leaves whole: units, dtypes, ignored modules."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.accel.strategies.training import WIDTH, Model, build, difference, largest, plain, train
from tests.helpers import run_distributed

CLOSE = 1e-5


class Mixed(torch.nn.Module):
    """A layer in fp64 among others in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 6)
        self.second = torch.nn.Linear(6, 4).double()
        self.beside = torch.nn.Linear(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).double()) + self.beside(inputs)


def check_dtypes_and_ignored() -> None:
    accelerator = build(fsdp={"ignored_modules": "bes.*"})
    model, expected = Mixed(), Mixed()
    for module in (model, expected):
        module.beside.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert not isinstance(model.beside.weight, DTensor)
    assert isinstance(model.second.weight, DTensor)
    assert model.second.weight.dtype == torch.float64
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
    state = accelerator.get_state_dict(model)
    assert difference(state, expected.state_dict()) < CLOSE
    assert state["second.weight"].dtype == torch.float64


def test_several_dtypes_and_ignored_modules() -> None:
    run_distributed(check_dtypes_and_ignored, 2)


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
    check_device()


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


def check_device() -> None:
    accelerator = build(fsdp={"ignored_modules": "embed.1"})
    strategy, device = accelerator.strategy, accelerator.device
    strategy.device = torch.device("meta")  # FSDP2 itself goes by the mesh
    model = accelerator.prepare(WithIgnored())
    tensors = (*model.embed[1].parameters(), *model.embed[1].buffers())
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    strategy.device = device
    accelerator.end_training()


@pytest.mark.parametrize(("world_size", "replicas", "accumulation"), [(2, 1, 2), (4, 2, 1)])
def test_ignored_modules_are_trained_alike(
    world_size: int, replicas: int, accumulation: int
) -> None:
    run_distributed(check_ignored_are_trained, world_size, replicas, accumulation)
