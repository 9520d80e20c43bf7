"""Sharded weights merged into one file, by the documented name: a re-export."""

from __future__ import annotations

from accel.weights.files import merge_weights as merge_fsdp_weights

__all__ = ["merge_fsdp_weights"]
