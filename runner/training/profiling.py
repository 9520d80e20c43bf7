"""The profiler that a recipe switches on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.profiler import profile

    from runner.training.current_run import Run


def profiler(loop: Run) -> AbstractContextManager[profile | None]:
    """Return the context of a loop's profiler; its traces go below the run directory."""
    handler = loop.recipe.profile
    if handler is None:
        return nullcontext()
    if handler.output_trace_dir is not None or handler.on_trace_ready is None:
        folder = loop.run_dir / (handler.output_trace_dir or "profile")
        handler = replace(handler, output_trace_dir=str(folder))
    return loop.accelerator.profile(handler)
