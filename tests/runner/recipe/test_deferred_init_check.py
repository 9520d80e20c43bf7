"""Weights initialized on rank 0, and on the meta device elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel.comm.rng import set_seed
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import ConfigError
from runner.recipe import deferred_init_check, parts
from runner.recipe.accelerator import running
from runner.recipe.batch_plan import plan_batches
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.launch.test_sharded_runs import (
    ENGINES,
    TINY,
    composed,
    trained,
    write_text,
)


def drawn(folder: str, *overrides: str) -> tuple[bool, float]:
    """Build as a worker does; return whether there are no weights, and what is drawn next."""
    recipe = composed(*overrides)
    plan = plan_batches(recipe.trainer, 2, None)
    with running(recipe, Path(folder), plan) as accelerator:
        set_seed(accelerator.process_index)
        step = parts.build_step(recipe, accelerator.strategy.init_context())
        (model,) = step.models.values()
        return all(p.is_meta for p in model.parameters()), torch.rand(()).item()


@pytest.mark.slow
def test_weights_are_drawn_on_the_first_process_alone(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    overrides = (*TINY, f"data.path={text}", *ENGINES["drawn once"][1])
    first, second = run_distributed(drawn, 2, str(tmp_path), *overrides)
    assert (first[0], second[0]) == (False, True)
    assert first[1] == second[1]
    runs = [trained(tmp_path, text, name) for name in ("two", "drawn once")]
    assert loops.losses(runs[0]) == loops.losses(runs[1])


def test_a_step_that_builds_its_own_models_draws_on_every_process() -> None:
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
    with pytest.raises(ConfigError, match="cpu_ram_efficient_loading=True with model=null"):
        deferred_init_check.check(loops.recipe_of(model=None, fsdp=plugin))
