"""Profiling part of a run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from accel.config.handlers import ProfileKwargs


@contextlib.contextmanager
def profile(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the code inside the context.

    With `output_trace_dir`, each cycle is written there as a Chrome trace; its name has `rank`.
    """
    if handler.output_trace_dir is not None:
        exports = _TraceFiles(Path(handler.output_trace_dir), rank, handler.on_trace_ready)
        handler = dataclasses.replace(handler, on_trace_ready=exports)
    with handler.build() as profiler:
        yield profiler


class _TraceFiles:
    """Called by the profiler after each cycle: writes one Chrome trace, then calls `also`."""

    def __init__(
        self, folder: Path, rank: int, also: Callable[[torch.profiler.profile], None] | None
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.cycles = 0
        self.also = also

    def __call__(self, profiler: torch.profiler.profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        cycle = f"_{self.cycles}" if self.cycles else ""
        profiler.export_chrome_trace(str(self.folder / f"profile_{self.rank}{cycle}.json"))
        self.cycles += 1
        if self.also is not None:
            self.also(profiler)
