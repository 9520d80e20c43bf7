"""What a run says of itself: epochs that exist, checkpoints with their steps, what is slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from accel.strategies.base import StateIO
from runner.training.run import count_parameters
from runner.training.summary import final_rows, header_rows, summary_of
from tests.runner import loops
from tests.runner.loops import newest, recipe_of


def test_checkpoints_are_told_with_their_steps(tmp_path: Path) -> None:
    loop = loops.build(tmp_path, recipe_of())
    loop.run()
    rows = dict(final_rows(loop, summary_of(loop)))
    assert rows["checkpoint"] == "checkpoints/checkpoint_3 (step 20)"
    assert rows["best state"].endswith(f"(step {loop.state.best_step})")


def test_a_run_whose_time_was_up_tells_how_it_goes_on(tmp_path: Path) -> None:
    loop = loops.build(tmp_path, recipe_of(trainer__max_time=1e-9))
    summary = loop.run()
    assert "resume" in dict(final_rows(loop, summary))
    again = loops.build(tmp_path, recipe_of(), resume_from=newest(tmp_path))
    assert (again.run()["complete"], again.state.step) == (True, 20)


def test_the_header_of_a_finished_run_names_its_last_epoch(tmp_path: Path) -> None:
    loops.run(tmp_path, recipe_of())
    loop = loops.build(tmp_path, recipe_of(), resume_from=newest(tmp_path))
    loop.run()
    assert dict(header_rows(loop))["resumed"] == "checkpoint_3 (step 20, epoch 4)"


class Partitioned(StateIO):
    """State of a strategy that leaves an empty parameter on a rank and keeps its full size."""

    def num_elements(self, parameter: Any) -> int:
        return int(parameter.full_size)


def test_partitioned_parameters_count_in_full() -> None:
    """R8: the number of parameters does not depend on the strategy."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.full_size = 4
    accelerator = SimpleNamespace(strategy=SimpleNamespace(state=Partitioned()))
    assert count_parameters(accelerator, {"model": model}) == (4, 4)  # type: ignore[arg-type]
