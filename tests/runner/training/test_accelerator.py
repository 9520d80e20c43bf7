"""Every node that a recipe shares with the engine reaches it (C2)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from accel.accelerator import Accelerator
from accel.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from accel.config.training import GradientAccumulationPlugin, ProjectConfiguration
from runner.recipe.schema import (
    Checkpoint,
    DataLoader,
    Distributed,
    Precision,
    Recipe,
    Tracker,
    Trainer,
)
from runner.training.build import make_accelerator, running
from tests.helpers import run_distributed


@dataclass(frozen=True)
class Plan:
    """What `make_accelerator` needs of the batch arithmetic."""

    micro_batch: int = 2
    accumulation: int = 3
    global_batch: int = 6


def recipe() -> Recipe:
    return Recipe(
        distributed=Distributed(
            device="cpu",
            ddp=DistributedDataParallelKwargs(bucket_cap_mb=7, static_graph=True),
            init=InitProcessGroupKwargs(timeout=90),
        ),
        precision=Precision(
            mode="fp16",
            autocast=AutocastKwargs(cache_enabled=False),
            scaler=GradScalerKwargs(init_scale=128.0, growth_interval=7),
            tf32=True,
        ),
        dataloader=DataLoader(even_batches=False, non_blocking=True),
        trainer=Trainer(
            accumulation=GradientAccumulationPlugin(sync_each_batch=True),
            rng_types=["torch"],
            device_placement=False,
        ),
        checkpoint=Checkpoint(project=ProjectConfiguration(total_limit=2, iteration=4)),
        tracker=Tracker(log_with=[]),
        profile=ProfileKwargs(with_flops=True),
    )


def test_handlers_and_plugins_reach_the_engine(tmp_path: Path) -> None:
    asked = recipe()
    with running(asked, tmp_path, Plan()) as accelerator:  # type: ignore[arg-type]
        assert torch.get_float32_matmul_precision() == "high"
        plan = accelerator.plan
        assert plan.device_type == "cpu"
        assert plan.mixed_precision == "fp16"
        assert plan.ddp == asked.distributed.ddp
        assert plan.init.timeout == timedelta(seconds=90)
        assert plan.autocast == asked.precision.autocast
        assert plan.scaler == asked.precision.scaler
        assert plan.profile == asked.profile
        assert plan.accumulation.num_steps == 3
        assert plan.accumulation.sync_each_batch
        assert plan.dataloader.even_batches is False
        assert plan.dataloader.non_blocking is True
        assert plan.rng_types == ("torch",)
        assert plan.device_placement is False
        assert plan.step_scheduler_with_optimizer is False
        assert plan.project.total_limit == 2
        assert plan.project.iteration == 4
        assert plan.project.project_dir == str(tmp_path)
        assert accelerator.scaler is not None
        assert accelerator.scaler.get_scale() == 128.0
        assert accelerator.gradient_state.num_steps == 3
    # The recipe is not written to: it is compared and saved elsewhere.
    assert asked == recipe()


def test_a_project_folder_of_its_own_is_kept(tmp_path: Path) -> None:
    asked = Recipe(
        distributed=Distributed(device="cpu"),
        checkpoint=Checkpoint(project=ProjectConfiguration(project_dir=str(tmp_path / "states"))),
        tracker=Tracker(log_with=[]),
    )
    accelerator = make_accelerator(asked, tmp_path, Plan())  # type: ignore[arg-type]
    assert accelerator.project_dir == str(tmp_path / "states")


class Tape:
    """A tracker that knows whether it was closed."""

    finished = failed = False

    def finish(self) -> None:
        self.finished = True


def fail(folder: Path, tape: Tape) -> Accelerator:
    """Return the engine after an error in its context."""
    accelerator = None
    with contextlib.suppress(ValueError):
        with running(recipe(), folder, Plan()) as accelerator:  # type: ignore[arg-type]
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


def test_one_process_is_ended_after_an_error(tmp_path: Path) -> None:
    tape = Tape()
    accelerator = fail(tmp_path, tape)
    assert (tape.finished, tape.failed) == (True, True)
    assert accelerator.trackers == []
