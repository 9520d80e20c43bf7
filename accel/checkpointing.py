"""Checkpoint directories, at the documented path: re-exports of `accel.checkpoint`."""

from __future__ import annotations

from accel.checkpoint.directory import is_complete, newest_complete, prune, read_manifest, verify

__all__ = ["is_complete", "newest_complete", "prune", "read_manifest", "verify"]
