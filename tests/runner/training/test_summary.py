"""What a run says of itself: epochs that exist, checkpoints with their steps, what is slow."""

from __future__ import annotations

from pathlib import Path

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
