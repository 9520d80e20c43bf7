"""C1, C2: a run is built from what its recipe names; what does not fit is refused."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from accel.accelerator import Accelerator
from accel.comm.rng import set_seed
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.machine.errors import ConfigError
from runner.data.datasets import Data
from runner.recipe import accelerator_arguments
from runner.recipe.batch_plan import plan_batches
from runner.recipe.factory import check_factories, register
from runner.recipe.schema import Distributed, Precision, Recipe, Tracker
from runner.training import build
from runner.training.run import Callback
from runner.training.step import Step, SupervisedStep
from tests.accel.precision.float8 import needs_torchao
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.launch.test_sharded_runs import ENGINES, TINY, composed, trained, write_text

RECIPE: dict[str, Any] = {
    "step": {"name": "supervised"},
    "model": {"name": "cnn", "width": 4},
    "data": {"name": "digits", "num_variants": 1},
    "objective": {"name": "classification"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "scheduler": {"name": "cosine"},
}


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{**RECIPE, **changes})


def problems(**changes: Any) -> list[str]:
    return [str(problem) for problem in check_factories(recipe(**changes))]


def test_what_a_data_factory_draws_is_of_the_seed_alone() -> None:
    register.data("drawn")(lambda: Data(TensorDataset(torch.rand(3))))
    drawn = []
    for before in range(2):  # an evaluation builds other things before
        torch.manual_seed(before)
        drawn.append(build.build_data(recipe(data={"name": "drawn"})).train.tensors[0])
    assert torch.equal(*drawn)


def test_the_parts_of_a_recipe() -> None:
    torch.manual_seed(0)
    step = build.build_step(recipe())
    assert isinstance(step, SupervisedStep)
    assert len(build.build_data(recipe()).train) > 1000  # type: ignore[arg-type]
    ((name, callback),) = build.build_callbacks(recipe(callbacks={"early_stopping": {}})).items()
    assert name == "early_stopping"
    assert isinstance(callback, Callback)
    optimizer = step.optimizers["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    schedule = step.make_schedulers(10)["optimizer"]
    assert schedule.optimizer is optimizer


def test_a_step_refuses_parts_it_would_not_use() -> None:
    found = problems(step={"name": "gan"})
    assert len(found) == 4
    assert "scheduler=cosine with step=gan: gan builds its own" in found[3]


class OwnStep(Step):
    """Has a constructor of its own."""

    def __init__(self, model: torch.nn.Module, rate: float = 0.1) -> None:
        self.models, self.optimizers, self.rate = {"model": model}, {}, rate

    def train(self, accelerator: Any, window: Any, trainer: Any) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self, batch: Any) -> dict[str, torch.Tensor]:
        return {}

    def summarize(self, values: Any) -> dict[str, float]:
        return {}


def test_a_step_of_the_users_own(registered: None, tmp_path: Path) -> None:
    register.step("own_a")(OwnStep)
    changes: dict[str, Any] = {"objective": None, "optimizer": None, "scheduler": None}
    step = build.build_step(recipe(step={"name": "own_a", "rate": 0.5}, **changes))
    assert isinstance(step, OwnStep)
    assert step.rate == 0.5
    assert len(problems(step={"name": "own_a"})) == 3


class HandsOn(SupervisedStep):
    """Hands on what it does not name."""

    def __init__(self, rate: float = 0.1, **parts: Any) -> None:
        super().__init__(**parts)
        self.rate = rate


@pytest.mark.parametrize("scheduler", [RECIPE["scheduler"], None], ids=["cosine", "null"])
def test_a_step_that_hands_on_what_it_is_given(registered: None, scheduler: Any) -> None:
    register.step("hands_on")(HandsOn)
    found = recipe(step={"name": "hands_on", "rate": 0.5}, scheduler=scheduler)
    assert check_factories(found) == []
    step = build.build_step(found)
    assert isinstance(step, HandsOn)
    assert step.rate == 0.5
    assert isinstance(step.optimizers["optimizer"], torch.optim.AdamW)
    assert bool(step.make_schedulers(10)) is (scheduler is not None)


BF16 = Precision(mode="bf16", weights="bf16")
ROUNDING = {"name": "adamw", "stochastic_rounding": True}


@needs_torchao
def test_weights_are_cast_before_the_optimizer_is_made() -> None:
    step = build.build_step(recipe(precision=BF16, optimizer=ROUNDING))
    model, optimizer = step.models["model"], step.optimizers["optimizer"]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert optimizer.bf16_stochastic_round is True


def test_buffers_and_tied_weights_stay_as_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.append(torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    build._cast(model)
    assert model[2].weight is model[0].weight
    assert model[0].weight.dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.float32


def test_updates_that_would_be_lost_are_refused() -> None:
    for optimizer in ({"name": "adamw"}, {"_target_": "torch.optim.SGD", "lr": 0.1}):
        with pytest.raises(ConfigError, match=r"updates of less than 2\*\*-9 of a weight are lost"):
            build.build_step(recipe(precision=BF16, optimizer=optimizer))


@needs_torchao
def test_rounding_without_weights_in_bf16_is_refused() -> None:
    with pytest.raises(ConfigError, match="it concerns weights in bf16, and there are none"):
        build.build_step(recipe(optimizer=ROUNDING))


def test_a_step_that_builds_its_own_models_decides_their_format() -> None:
    nodes = dict.fromkeys(("model", "objective", "optimizer", "scheduler"))
    with pytest.raises(ConfigError, match=r"parameters of '\w+' are in fp32"):
        build.build_step(recipe(precision=BF16, step={"name": "gan"}, **nodes))


def drawn(folder: str, *overrides: str) -> tuple[bool, float]:
    """Build as a worker does; return whether there are no weights, and what is drawn next."""
    recipe = composed(*overrides)
    plan = plan_batches(recipe.trainer, 2, None)
    with build.running(recipe, Path(folder), plan) as accelerator:
        set_seed(accelerator.process_index)
        step = build.build_step(recipe, accelerator.strategy.init_context())
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
    (problem,) = accelerator_arguments.problems(loops.recipe_of(model=None, fsdp=plugin))
    assert "cpu_ram_efficient_loading=True with model=null" in str(problem)


# -- the engine ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What `make_accelerator` needs of the batch arithmetic."""

    micro_batch: int = 2
    accumulation: int = 3
    global_batch: int = 6


ALONE = Recipe(distributed=Distributed(device="cpu"), tracker=Tracker(log_with=[]))


class Tape:
    """A tracker that knows whether it was closed."""

    finished = failed = False

    def finish(self) -> None:
        self.finished = True


def fail(folder: Path, tape: Tape) -> Accelerator:
    """Return the engine after an error in its context."""
    accelerator = None
    with contextlib.suppress(ValueError):
        with build.running(ALONE, folder, Plan()) as accelerator:  # type: ignore[arg-type]
            accelerator.tracker_group.trackers = [tape]  # type: ignore[list-item]
            raise ValueError
    assert accelerator is not None
    return accelerator


def fail_in_group(folder: str) -> tuple[bool, bool]:
    """Return (tracker closed, process group still there)."""
    import torch.distributed as dist

    tape = Tape()
    fail(Path(folder), tape)
    return tape.finished and tape.failed, dist.is_initialized()


def test_after_an_error_trackers_are_closed_and_nobody_is_waited_for(tmp_path: Path) -> None:
    assert run_distributed(fail_in_group, 2, str(tmp_path)) == [(True, True)] * 2
