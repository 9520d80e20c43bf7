"""The progress bar, at the documented path: a re-export."""

from __future__ import annotations

from accel.run.progress import tqdm

__all__ = ["tqdm"]
