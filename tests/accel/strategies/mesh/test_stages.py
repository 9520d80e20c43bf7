"""Where a model is divided into pipeline stages, and what is refused by name. Holds E5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

from accel.machine.errors import ConfigError
from accel.strategies.mesh.stages import divide
from tests.accel.strategies.mesh.test_pipeline import accelerator_of, deep, loss_fn, windows
from tests.accel.strategies.training import Model
from tests.helpers import WorkerError, run_distributed


def by_function(model: torch.nn.Module, num_stages: int) -> list[list[str]]:
    return [["embed", "blocks.0"], ["head", *(f"blocks.{index}" for index in (1, 2, 3))]]


@pytest.mark.parametrize(
    ("split", "first"),
    [
        (None, ["embed", "blocks.0", "blocks.1"]),
        (["blocks.3"], ["embed", "blocks.0", "blocks.1", "blocks.2"]),
        (["blocks"], ["embed"]),
        (["blocks.1.down"], ["embed", "blocks.0", "blocks.1.norm", "blocks.1.up"]),
        (by_function, ["embed", "blocks.0"]),
    ],
)
def test_where_stages_begin(split: Any, first: list[str]) -> None:
    stages = divide(deep(), 2, split)
    assert [name for name, stage in stages.items() if stage == 0] == first
    assert set(stages.values()) == {0, 1}


@pytest.mark.parametrize(
    ("model", "num_stages", "split", "found"),
    [
        (Model(), 3, None, "it has 2"),
        (Model(), 2, ["block.1"], "Did you mean"),
        (Model(), 2, ["blocks.0", "blocks.1"], "makes 2 stages"),
        (Model(), 2, ["embed"], "makes 2 stages"),
        (Model(), 2, lambda *_: [["embed"], ["blocks"]], "each module with weights is in one"),
    ],
)
def test_what_makes_no_stages_is_refused(
    model: torch.nn.Module, num_stages: int, split: Any, found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        divide(model, num_stages, split)


class Late(Model):
    """Its head is called first; or what is of no block needs another stage, or its values."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = first = self.embed(tokens)
        if self.does == "turns":
            return self.blocks[1](self.blocks[0](self.head(hidden) @ self.embed.weight))
        for block in self.blocks:
            hidden = block(hidden)
        if self.does == "reads":
            return self.head(hidden) * first.abs().mean().item()
        return self.head(hidden + 2 * first)


def train_late(does: str) -> None:
    accelerator = accelerator_of(pp_size=2)
    accelerator.forward_backward(accelerator.prepare(Late(does)), windows(1)[0], loss_fn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "found"),
    [
        ("turns", "in the order of the stages"),
        ("skips", "of an earlier stage"),
        ("reads", "knows its shape, and no values"),
    ],
)
def test_modules_out_of_order_and_tensors_that_skip_a_stage_are_refused(
    does: str, found: str
) -> None:
    with pytest.raises(WorkerError, match=found):
        run_distributed(train_late, 2, does)


def check_objects() -> None:
    """torch's own stages and schedule compute, of a first stage that is frozen, too."""
    accelerator = accelerator_of(pp_size=2)
    model = deep()
    for block in (model.embed, model.blocks[0], model.blocks[1]):
        block.requires_grad_(False)
    model = accelerator.prepare(model)
    accelerator.forward_backward(model, windows(1)[0], loss_fn)
    schedule = model.pipeline._prepared[1]
    assert isinstance(schedule, Schedule1F1B)
    assert isinstance(schedule._stage, PipelineStage)
    trained = [p for p in model.parameters() if p.grad is not None]
    assert bool(trained) is (accelerator.process_index == 1)
    sizes = accelerator.comm.all_gather_object(sum(p.numel() for p in model.parameters()))
    assert max(sizes) < 0.7 * sum(p.numel() for p in deep().parameters())
    accelerator.end_training()


@pytest.mark.slow
def test_the_objects_are_those_of_torch() -> None:
    run_distributed(check_objects, 2)
