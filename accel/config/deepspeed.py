"""The plugin of DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains a model."""
